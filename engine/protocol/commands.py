"""Control: what a client may ask of the engine, and what it is answered.

A request is `[id (u64, big-endian), msgpack command]` from a DEALER socket; every reply to it
carries the same id: `[id, msgpack reply]`. One command has one reply, except `Submit`, which is
answered by `Submitted` and then by `Output` messages until one of them is `finished`. Where a
client asks for it, outputs of several commands come in one `Bundle`, whose id is 0. A connection
uses an id once: the same frames again are answered as the first time. Decoding is strict (no
unknown fields) and bounded: a command of more than `MAX_COMMAND_BYTES` is answered with an error,
and a frame of more than twice that, or a heap of what is not taken (`Backlog`), ends the connection
without an answer.
"""

from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from stepscope.engine.protocol.settings.sampling_params import SamplingParams, TokenId
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.protocol.wire import KnobValue, decode_bounded

MAX_COMMAND_BYTES = 8 * 1024 * 1024
MAX_PAST_S = 3_600.0
MAX_LEASE_S = 60.0

Name: TypeAlias = Annotated[str, Meta(max_length=256)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=1_000_000)]


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation, for the model's chat template."""

    role: Name
    content: str


class Command(
    Struct, frozen=True, kw_only=True, tag_field="type", tag=True, forbid_unknown_fields=True
):
    """Base of what may be asked."""


class GetInfo(Command, frozen=True):
    pass


class GetSnapshot(Command, frozen=True):
    pass


class GetKeptSnapshot(Command, frozen=True, kw_only=True):
    """A snapshot of about so long ago, from which on the replay ring still holds all messages.

    To be sent where `EngineInfo.keeps_snapshots` is.
    """

    past_s: Annotated[float, Meta(ge=0, le=MAX_PAST_S)]


class ReplayFrom(Command, frozen=True, kw_only=True):
    """Messages from `sequence` on that the replay ring still holds, oldest first."""

    sequence: Annotated[int, Meta(ge=0)]
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class GetAudit(Command, frozen=True, kw_only=True):
    """Entries of the audit trail with a number above `after`, oldest first."""

    after: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 1_000


class Change(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what changes something; all of it is in the audit trail.

    `once` names this very command: who sends it again, because no answer came, gets the answer of
    the first time and nothing is done twice. `engine_id` keeps it from an engine that has taken the
    place of the one it was meant for. `seen` is the number of the last entry of the audit trail
    that the client knew of: a later change of the same kind by another client is a conflict.
    """

    doing: ClassVar[str]  # in words, for who may not

    who: Name = "unknown"
    once: Annotated[str, Meta(max_length=64)] = ""
    engine_id: Annotated[str, Meta(max_length=64)] = ""
    seen: Annotated[int, Meta(ge=0)] | None = None


class SetKnobs(Change, frozen=True, kw_only=True):
    """All of `changes` or none. `expected_version` guards against overwriting another's change.

    With `lease_s` they hold for so long: unless the client sends a change with a lease again, the
    engine puts the values from before the lease back.
    """

    doing = "changing knobs"

    changes: Annotated[dict[Name, KnobValue], Meta(min_length=1, max_length=64)]
    expected_version: int | None = None
    dry_run: bool = False
    reason: Annotated[str, Meta(max_length=200)] = ""  # for the audit trail
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] | None = None


class Pause(Change, frozen=True):
    doing = "pausing the engine"


class Resume(Change, frozen=True):
    doing = "resuming the engine"


class StepOnce(Change, frozen=True, kw_only=True, tag="Step"):
    """Run `n` steps, then pause."""

    doing = "running single steps"

    n: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class KVTicket(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the keys and values of a request lie until the engine that goes on has loaded them."""

    file: Annotated[str, Meta(pattern="^stepscope-kv-[0-9a-f]{32}$")]
    layout: Annotated[str, Meta(max_length=64)]  # the model and the shape of its KV blocks
    frames: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=1_000_000)]
    stamp: Annotated[int, Meta(ge=1)]  # of the frames for as long as this is in them


class HandedOver(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a prefill engine has done for a request. Times are nanoseconds of `time.monotonic_ns`.

    The KV cache has all tokens but the newest, which is to be computed next.
    """

    engine: Name
    request_id: Annotated[int, Meta(ge=0)]  # there
    output_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1_000_000)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # its further tokens are drawn by
    arrival_ns: int
    first_token_ns: int
    last_token_ns: int
    sent_ns: int  # its keys and values were copied
    kv: KVTicket


class Submit(Command, frozen=True, kw_only=True):
    """A prompt as text, as token ids or as a conversation (exactly one of the three).

    `max_prompt_tokens` keeps the first so many tokens: a client without the tokenizer sends enough
    text and lets the engine cut it.
    """

    doing: ClassVar[str] = "sending requests"

    client_id: Name = ""
    prompt: str | None = None
    prompt_token_ids: TokenIds | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=10_000)] | None = None
    max_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    sampling: SamplingParams = SamplingParams()
    fit_max_tokens: bool = False  # lower max_tokens to what max_model_len leaves; else refuse
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0  # lower is served first
    stream: bool = True  # one Output a token; else one at the end
    with_text: bool = True
    # Its outputs may come in a `Bundle`; to be set where `EngineInfo.bundles` is.
    bundle: bool | UnsetType = UNSET
    # Of a request that a prefill engine hands over; to be sent where `EngineInfo.role` is "decode".
    handed_over: HandedOver | UnsetType = UNSET


class Withdraw(Command, frozen=True, kw_only=True):
    """The client has given up a `Submit` of this connection that is not answered yet.

    One that still waits to be tokenised is answered with the error `withdrawn`. Any other becomes a
    request, to be ended with `Abort`.
    """

    command_id: Annotated[int, Meta(ge=0)]  # of the `Submit`


class Abort(Change, frozen=True, kw_only=True):
    doing = "aborting requests"

    request_id: int


class ResetPrefixCache(Change, frozen=True):
    doing = "resetting the prefix cache"


class SetWorkload(Change, frozen=True, kw_only=True):
    """Start (or replace) the engine's own workload; None stops it."""

    doing = "changing the workload"

    workload: WorkloadSpec | None = None


class Drain(Change, frozen=True):
    """Refuse new requests and finish the ones that are there. `Resume` opens the door again."""

    doing = "draining the engine"


class Shutdown(Change, frozen=True):
    doing = "shutting the engine down"


AnyCommand: TypeAlias = (
    GetInfo
    | GetSnapshot
    | GetKeptSnapshot
    | ReplayFrom
    | GetAudit
    | SetKnobs
    | Pause
    | Resume
    | StepOnce
    | Submit
    | Withdraw
    | Abort
    | ResetPrefixCache
    | SetWorkload
    | Drain
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def encode(command: Command) -> bytes:
    return _encoder.encode(command)


def decode_command(payload: bytes) -> AnyCommand:
    """Raises msgspec.DecodeError (malformed) or msgspec.ValidationError (wrong field, too big)."""
    if len(payload) > MAX_COMMAND_BYTES:
        raise msgspec.ValidationError(
            f"command of {len(payload)} bytes, at most {MAX_COMMAND_BYTES} are taken"
        )
    return decode_bounded(_decoder, payload)
