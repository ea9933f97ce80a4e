"""Telemetry: what happens to a request, in the record of its step. A part of `wire`."""

from typing import TypeAlias

from msgspec import Struct


class RequestOrigin(Struct, frozen=True):
    """The engine that a request comes from, with its output so far. Times as `Arrived.time_ns`."""

    engine: str  # its name
    request_id: int | None  # there; None: it had none yet
    num_output_tokens: int
    first_token_ns: int
    last_token_ns: int
    # Its keys and values were copied; until then it waited for room. None: it was given back, for
    # that engine is gone.
    sent_ns: int | None
    received_ns: int


class Event(Struct, frozen=True, tag_field="type", tag=str.lower):
    """Something that happened to one request, in the step (or between steps) that reports it."""

    request_id: int


class Arrived(Event, frozen=True, omit_defaults=True):
    client_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    time_ns: int
    prompt_token_ids: list[int] | None = None  # only of an engine with `with_tokens`, ...
    prompt_text: str | None = None  # ... and only if it has a tokenizer
    # Only of an engine with `prefix_hashes`: of the full blocks of the prompt, 64 bits each, salted
    # by the engine. Two contexts are equal up to their last equal hash.
    prefix_hashes: list[int] | None = None
    origin: RequestOrigin | None = None  # None: from a client


class Admitted(Event, frozen=True, omit_defaults=True):
    num_cached_tokens: int
    # Of a request that was handed over: keys and values that were copied, while the step was
    # scheduled, and how long that took.
    num_loaded_tokens: int = 0
    load_ns: int = 0


class FirstToken(Event, frozen=True):
    pass


class Finished(Event, frozen=True, omit_defaults=True):
    reason: str  # stop, length, or handed_over: it goes on in another engine
    num_output_tokens: int
    prefix_hashes: list[int] | None = None  # of the full blocks after those in `Arrived`
    handed_to: str | None = None  # the name of that engine


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
