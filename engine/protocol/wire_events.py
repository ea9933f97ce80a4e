"""Telemetry: what happens to a request, in the record of its step. A part of `wire`."""

from typing import TypeAlias

from msgspec import Struct


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


class Admitted(Event, frozen=True):
    num_cached_tokens: int


class FirstToken(Event, frozen=True):
    pass


class Finished(Event, frozen=True, omit_defaults=True):
    reason: str  # stop, length
    num_output_tokens: int
    prefix_hashes: list[int] | None = None  # of the full blocks after those in `Arrived`


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
