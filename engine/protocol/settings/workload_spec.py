"""`WorkloadSpec`: which requests an engine sends to itself (`SetWorkload`).

The fields of `WorkloadSpec` are also command-line options, with the same bounds and descriptions.
"""

from typing import Annotated

from msgspec import Meta, Struct

NO_WORKLOAD = "none"  # stands for "no workload" in texts


class WorkloadSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A synthetic mix of short chats and a few long documents, with Poisson arrivals."""

    rate: Annotated[
        float, Meta(gt=0.0, le=10_000.0, description="requests a second, on average")
    ] = 1.0
    document_share: Annotated[
        float, Meta(ge=0.0, le=1.0, description="share of long documents, the rest are chats")
    ] = 0.1
    chat_tokens: Annotated[int, Meta(ge=1, description="mean prompt of a chat, in tokens")] = 128
    document_tokens: Annotated[
        int, Meta(ge=1, description="mean prompt of a document, in tokens")
    ] = 3072
    output_tokens: Annotated[int, Meta(ge=1, description="mean output, in tokens")] = 64
    num_requests: (
        Annotated[int, Meta(ge=1, description="stop after so many (default: go on)")] | None
    ) = None
    max_concurrency: (
        Annotated[
            int, Meta(ge=1, description="requests under way at most; further arrivals are put off")
        ]
        | None
    ) = None
    temperature: Annotated[
        float, Meta(ge=0.0, le=100.0, description="of the sampling; 0 is greedy")
    ] = 0.0
    questions: Annotated[
        bool,
        Meta(
            description="chats are questions in the model's chat template, and end where it ends "
            "them; for a model that speaks"
        ),
    ] = False
    seed: Annotated[int, Meta(description="equal seeds make equal workloads")] = 0
