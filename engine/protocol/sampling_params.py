"""`SamplingParams`: how to sample the tokens of one request (`Submit`); set by its client."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen, and when it ends.

    Penalties apply first, on the logits; then temperature, min-p and top-k; then top-p on what is
    left. Top-k and top-p also keep tokens that tie with the last one they keep.

    None of the first `min_tokens` tokens ends a request, by itself or by completing a stop string.
    The text ends at the first stop string that is complete; if several end at the same character,
    the longest counts. Special tokens have no text, so `stop` never matches them: use
    `stop_token_ids`. The token that ends a request is in its `token_ids`, but in its text only with
    `include_stop`.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] = 16
    min_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0  # 0: greedy
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: all
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0  # prompt and output; 1: none
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # output only
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # output only
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...], Meta(max_length=16)
    ] = ()
    include_stop: bool = False  # whether the text includes the stop string or token that ended it
    # Of the chosen token and of this many most likely ones.
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
