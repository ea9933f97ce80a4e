"""Telemetry: what happens to requests, as the record of a step reports it. A part of `wire`."""

from typing import TypeAlias

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
