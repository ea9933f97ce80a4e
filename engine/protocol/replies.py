"""Control: the engine's replies to clients; `commands` describes the framing."""

from typing import TypeAlias

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.wire import Audited, EngineInfo, KnobValue, Snapshot, decode_bounded


class Reply(Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all replies."""


class Ack(Reply, frozen=True, kw_only=True):
    """Answer to a command that was carried out, after the earlier changes of the same client.

    That happens between two steps, some steps later if many commands wait.
    """

    effective_step: int  # the first step with the change; all later ones have it, too
    version: int | None = None  # of the knobs, after SetKnobs
    detail: str = ""


class Error(Reply, frozen=True, kw_only=True):
    """Answer to a command that was refused; nothing was changed."""

    code: str
    message: str
    knobs: dict[str, KnobValue] | None = None  # the values as they are now, after a conflict
    knobs_version: int | None = None


class Submitted(Reply, frozen=True, kw_only=True):
    request_id: int
    num_prompt_tokens: int


class Loaded(Reply, frozen=True, kw_only=True):
    """Tells a prefill engine that the decode engine has copied a request's keys and values."""

    request_id: int


class TokenLogprob(Struct, array_like=True, frozen=True):
    token_id: int
    logprob: float  # always finite: -9999 for an impossible token
    text: str = ""  # of this token alone; "" also when the client wants no text
    utf8: bytes | None = None  # if it is a part of a character; None: as `text`, or unknown


class PositionLogprobs(Struct, array_like=True, frozen=True):
    """Natural logprobs at one position, before temperature, penalties and top-k/p."""

    chosen: TokenLogprob
    rank: int  # of the chosen token; 1 is the most likely
    top: list[TokenLogprob]  # the most likely tokens, best first; as many as the request asked for
    text_offset: int | None = None  # characters of the output's text before the chosen token


# Why a request was ended whose next token the model did not say.
UNSOUND_LOGITS = "the model gave no finite logits for its next token"


class Output(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of a request. The last output has a `finish_reason`: stop, length or abort.

    Text is sent once it is certain: incomplete characters, and text that may begin a stop string,
    come with a later output. A stop string cuts the text, but not the tokens.
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
    why: str | None = None  # why it was aborted


class Bundle(Reply, frozen=True, kw_only=True):
    """Outputs that were ready at the same time, oldest first, each with the id of its `Submit`."""

    outputs: list[tuple[int, Output]]


class ReplayedFrame(Struct, array_like=True, frozen=True):
    topic: bytes
    sequence: int
    payload: bytes


class Replayed(Reply, frozen=True, kw_only=True):
    frames: list[ReplayedFrame]
    oldest_sequence: int  # of the oldest message in the replay ring
    next_sequence: int  # of the next message to be published


class AuditPage(Reply, frozen=True, kw_only=True):
    entries: list[Audited]
    oldest: int  # number of the oldest entry that the engine keeps; 0 if it has none
    newest: int
    detail: str = ""  # where to find older entries, if some of those asked for are gone


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
