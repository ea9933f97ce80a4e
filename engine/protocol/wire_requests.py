"""Telemetry: a request as a snapshot describes it. A part of `wire`."""

from typing import Literal, TypeAlias

from msgspec import Struct

from stepscope.engine.protocol.wire_events import PrefixMisses, RequestOrigin

RequestStatus: TypeAlias = Literal["waiting", "running", "preempted", "finished"]


class FrontTimes(Struct, array_like=True, frozen=True, gc=False):
    """A request as its front end sees it; see `FrontEnd`. None: not yet, or unknown."""

    number: int  # of the front end
    http_ns: int | None
    sent_ns: int
    is_streamed: bool
    first_came_ns: int | None = None  # of its first chunk
    first_out_ns: int | None = None
    last_out_ns: int | None = None
    num_chunks: int = 0
    worst_gap_ns: int = 0  # the longest between two chunks


class RequestView(Struct, kw_only=True):
    """One request as an observer sees it: part of a `Snapshot` and of the observer's own state."""

    request_id: int
    client_id: str
    status: RequestStatus
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finish_reason: str | None = None
    finish_step: int | None = None
    finish_ns: int | None = None
    # The observer missed its arrival, in a gap: arrival_ns and max_tokens are unknown and set to 0,
    # and num_prompt_tokens is the context it had when it was first seen.
    is_partial: bool = False
    origin: RequestOrigin | None = None  # if it was handed over to this engine
    handed_to: str | None = None  # the engine that continues it
    # Most tokens computed before it lost them or left another engine. 0: none, or not known.
    high_water: int = 0
    held: str = ""  # why the engine holds it back while it waits, as in `HeldRow`
    front: FrontTimes | None = None  # None: no front end tells of it
    misses: PrefixMisses | None = None  # None: not admitted yet, or the engine does not say


class Transcript(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prompt and output so far of an unfinished request. The texts are None without a tokenizer."""

    request_id: int
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    output_token_ids: list[int] | None = None
    output_text: str | None = None
