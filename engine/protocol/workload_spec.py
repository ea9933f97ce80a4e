"""`WorkloadSpec`: which requests an engine sends to itself (`SetWorkload`).

The fields of `WorkloadSpec` are also command-line options, with the same bounds and descriptions.
"""

from typing import Annotated

from msgspec import Struct

from stepscope.engine.protocol.knobs import doc

NO_WORKLOAD = "none"  # stands for "no workload" in texts


class WorkloadSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A synthetic mix of short chats and a few long documents, with Poisson arrivals."""

    rate: Annotated[float, doc("requests a second, on average", gt=0.0, le=10_000.0)] = 1.0
    document_share: Annotated[
        float, doc("share of long documents, the rest are chats", ge=0.0, le=1.0)
    ] = 0.1
    chat_tokens: Annotated[int, doc("mean prompt of a chat, in tokens", ge=1)] = 128
    document_tokens: Annotated[int, doc("mean prompt of a document, in tokens", ge=1)] = 3072
    output_tokens: Annotated[int, doc("mean output, in tokens", ge=1)] = 64
    num_requests: Annotated[int, doc("stop after so many (default: go on)", ge=1)] | None = None
    max_concurrency: Annotated[int, doc("most requests under way; others wait", ge=1)] | None = None
    temperature: Annotated[float, doc("of the sampling; 0 is greedy", ge=0.0, le=100.0)] = 0.0
    questions: Annotated[
        bool, doc("chats are questions in the chat template, for a model that speaks")
    ] = False
    seed: Annotated[int, doc("equal seeds make equal workloads")] = 0
