"""Telemetry: requests, as events of a step and as a snapshot describes them. A part of `wire`."""

from typing import Literal, TypeAlias

from msgspec import Struct


class RequestOrigin(Struct, frozen=True):
    """The engine that a request comes from, and how far that engine had computed it.

    Times are by the same clock as `Arrived.time_ns`.
    """

    engine: str  # its name
    request_id: int | None  # the request's number in that engine; None: it had none yet
    num_output_tokens: int
    first_token_ns: int
    last_token_ns: int
    # When its keys and values were copied; until then it waited for room. None: the request came
    # back because that engine is gone.
    sent_ns: int | None
    received_ns: int


class Event(Struct, frozen=True, tag_field="type", tag=str.lower):
    """Something that happened to one request in the step that reports it, or between steps."""

    request_id: int


class Arrived(Event, frozen=True, omit_defaults=True):
    client_id: str
    num_prompt_tokens: int
    max_tokens: int  # 0: it only reads its prompt, as for an embedding
    priority: int
    time_ns: int
    prompt_token_ids: list[int] | None = None  # only with `with_tokens`, ...
    prompt_text: str | None = None  # ... and only from an engine with a tokenizer
    # Only with `prefix_hashes`: one salted 64-bit hash for each full block of the prompt. Two
    # contexts are equal up to the end of the last block whose hashes are equal.
    prefix_hashes: list[int] | None = None
    origin: RequestOrigin | None = None  # None: it came from a client
    # Of an engine whose clients, or their proxy, send a request to two engines: the client id under
    # which another engine has computed its prompt. Empty: another engine will load what this one
    # computes. None: neither.
    elsewhere: str | None = None


class PrefixMisses(Struct, array_like=True, frozen=True, gc=False):
    """Why tokens of a prompt were not in the prefix cache, and what a larger one had hit.

    The tokens of a prompt are, in this order: hit, evicted, and diverged or new. The last token and
    what does not fill a block are never hit; unless they have diverged, they count as new.
    """

    num_evicted: int  # they were in the cache, and are remembered
    num_diverged: int  # the prompt begins like an earlier one, which goes on otherwise
    num_more_hits_1_5x: int  # tokens that a pool 1.5 times as large would have hit besides
    num_more_hits_2x: int  # ... and one twice as large
    diverged_from: int | None = None  # the request with that earlier prompt
    evicted_by: int | None = None  # the request for which the first missing block was evicted
    evicted_ns: int | None = None  # when
    life_ns: int | None = None  # how long it had been in the cache


class Admitted(Event, frozen=True, omit_defaults=True):
    num_cached_tokens: int
    # Tokens whose keys and values came from elsewhere: of a handed-over request while the step was
    # scheduled; through a KV connector within the step, or before it if `is_loaded_early`.
    num_loaded_tokens: int = 0
    load_ns: int = 0  # how long that took; 0: unknown, it is a part of the step
    misses: PrefixMisses | None = None  # None: it comes back, or the engine does not say
    is_loaded_early: bool = False  # the request waited in the queue meanwhile


class FirstToken(Event, frozen=True):
    pass


class Finished(Event, frozen=True, omit_defaults=True):
    reason: str  # stop, length, or handed_over: another engine continues it
    num_output_tokens: int
    prefix_hashes: list[int] | None = None  # of the full blocks after those in `Arrived`
    handed_to: str | None = None  # the name of that other engine


class Preempted(Event, frozen=True):
    num_blocks: int  # freed
    reason: str


class Aborted(Event, frozen=True):
    reason: str


class Rejected(Event, frozen=True):
    client_id: str
    reason: str


RequestEvent: TypeAlias = (
    Arrived | Admitted | FirstToken | Finished | Preempted | Aborted | Rejected
)


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
    elsewhere: str | None = None  # as in `Arrived`


class Transcript(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Prompt and output so far of an unfinished request. The texts are None without a tokenizer."""

    request_id: int
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    output_token_ids: list[int] | None = None
    output_text: str | None = None
