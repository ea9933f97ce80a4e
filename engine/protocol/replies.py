"""Control: what a client is answered; `commands` says how."""

from typing import TypeAlias

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.wire import Audited, EngineInfo, KnobValue, Snapshot, decode_bounded


class Reply(Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of what is answered."""


class Ack(Reply, frozen=True, kw_only=True):
    """It was done, between two steps: after the changes its client sent before it.

    Where many wait it may take some steps until its turn comes; `effective_step` is the one that
    was next then: no step before it had the change, and this one and all after it have.
    """

    effective_step: int  # the first step for which it holds
    version: int | None = None  # of the knobs, after SetKnobs
    detail: str = ""


class Error(Reply, frozen=True, kw_only=True):
    """Nothing was changed. `code` is for programs, `message` says what to do."""

    code: str
    message: str
    knobs: dict[str, KnobValue] | None = None  # of a conflict: the values as they are now
    knobs_version: int | None = None


class Submitted(Reply, frozen=True, kw_only=True):
    request_id: int
    num_prompt_tokens: int


class Loaded(Reply, frozen=True, kw_only=True):
    """The keys and values of a request that was handed over are copied: their frames are free."""

    request_id: int


class TokenLogprob(Struct, array_like=True, frozen=True):
    token_id: int
    logprob: float  # a finite number: -9999 for what is impossible
    text: str = ""  # of this token alone; "" also when the client wants no text


class PositionLogprobs(Struct, array_like=True, frozen=True):
    """How likely an output token was, before temperature, penalties and cuts (natural log)."""

    chosen: TokenLogprob
    rank: int  # of the chosen one, 1 is the most likely
    top: list[TokenLogprob]  # the most likely ones, best first; as many as were asked for


class Output(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a request. The last one has `finish_reason`: stop, length or abort.

    Text comes when it is certain: characters in the making, and what may begin a stop string, come
    with a later output. The tokens of text that is cut off by a stop string are still there.
    """

    request_id: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far
    logprobs: list[PositionLogprobs] | None = None  # one for each of token_ids, if asked for
    stop: str | int | None = None  # the stop string or token id that ended it, if one did


class Bundle(Reply, frozen=True, kw_only=True):
    """Outputs that were ready together, oldest first, each with the id of its `Submit`."""

    outputs: list[tuple[int, Output]]


class ReplayedFrame(Struct, array_like=True, frozen=True):
    topic: bytes
    sequence: int
    payload: bytes


class Replayed(Reply, frozen=True, kw_only=True):
    frames: list[ReplayedFrame]
    oldest_sequence: int  # the oldest the ring holds
    next_sequence: int  # the one the publisher will use next


class AuditPage(Reply, frozen=True, kw_only=True):
    entries: list[Audited]
    oldest: int  # number of the oldest entry that is kept, 0 without any
    newest: int
    detail: str = ""  # where older ones are, when some that were asked for are not kept any more


AnyReply: TypeAlias = (
    Ack
    | Error
    | Submitted
    | Loaded
    | Output
    | Bundle
    | Replayed
    | AuditPage
    | EngineInfo
    | Snapshot
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(reply: Reply | EngineInfo | Snapshot | msgspec.Raw) -> bytes:
    return _encoder.encode(reply)


def decode_reply(payload: bytes) -> AnyReply:
    return decode_bounded(_decoder, payload)
