"""Control: the commands that a client may send to the engine.

Framing: a command is `[id (u64, big-endian), msgpack command]` from a DEALER socket. Every reply to
it carries the same id: `[id, msgpack reply]`. A connection uses each id once: the same frames sent
again get the same answer.

Replies: one command has one reply, except `Submit`. It gets `Submitted`, then `Output` messages
until one has a `finish_reason`. Outputs of several commands that are ready together come in one
`Bundle`, whose id is 0.

Limits: decoding is strict (no unknown fields) and bounded. A command of more than
`MAX_COMMAND_BYTES` is answered with an error. A frame of more than twice that ends the connection
without an answer.
"""

from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from stepscope.engine.protocol.sampling_params import SamplingParams, TokenId
from stepscope.engine.protocol.wire import KnobValue, decode_bounded
from stepscope.engine.protocol.workload_spec import WorkloadSpec

LOCAL = "local"  # key of a client with the engine's own account, which proves no more than that
_KEY = "key"


class Asker(NamedTuple):
    """The client that gives a command: the name it gives itself, and the key it proved to hold."""

    who: str
    key: str | None = None

    @property
    def proved(self) -> str:
        """Name of the proved key, as "key NAME"; empty without one, and for `LOCAL`.

        No client can give itself such a name: `claimed` puts it in quotes.
        """
        return "" if self.key in (None, LOCAL) else f"{_KEY} {self.key}"

    @property
    def claimed(self) -> str:
        """The name the client gives itself, in quotes if it could pass for a proved name."""
        words = self.who.split()
        if not words:
            return "unknown"
        looks_proved = words[0].casefold() == _KEY or not self.who.isascii()
        return f'"{self.who}"' if looks_proved else self.who

    @property
    def name(self) -> str:
        """The name to show: the proved key if there is one, else the claimed name."""
        return self.proved or self.claimed


MAX_COMMAND_BYTES = 8 * 1024 * 1024
MAX_PAST_S = 3_600.0
MAX_LEASE_S = 60.0

Name: TypeAlias = Annotated[str, Meta(max_length=256)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=1_000_000)]


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation, for the model's chat template."""

    role: Name
    content: str | list[str]  # a text, or the texts of its parts

    @property
    def texts(self) -> list[str]:
        return [self.content] if isinstance(self.content, str) else self.content


class Command(
    Struct, frozen=True, kw_only=True, tag_field="type", tag=True, forbid_unknown_fields=True
):
    """Base of all commands."""


class GetInfo(Command, frozen=True):
    pass


class GetSnapshot(Command, frozen=True):
    pass


class GetKeptSnapshot(Command, frozen=True, kw_only=True):
    """Get a snapshot from about `past_s` ago, of an engine with `EngineInfo.keeps_snapshots`.

    The engine still keeps every message that it sent after the snapshot (`ReplayFrom`).
    """

    past_s: Annotated[float, Meta(ge=0, le=MAX_PAST_S)]


class ReplayFrom(Command, frozen=True, kw_only=True):
    """Get the messages that are still kept from number `sequence` on: at most 256, ask again."""

    sequence: Annotated[int, Meta(ge=0)]
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class GetAudit(Command, frozen=True, kw_only=True):
    """Get the entries of the audit trail with a number above `after`, oldest first."""

    after: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 1_000


class Change(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the commands that change something. The audit trail records them all.

    Attributes:
        once: a unique name of this command. Sent again under it, for want of an answer, the
            command gets the answer of the first time: nothing is done twice.
        engine_id: if given, an engine that was restarted at the same address refuses the command.
        seen: number of the last audit entry that the client has seen. If another client has since
            changed the same thing (such as the knobs), the command is refused as a conflict.
    """

    doing: ClassVar[str]  # the change in words, for the message that denies it

    who: Name = "unknown"
    once: Annotated[str, Meta(max_length=64)] = ""
    engine_id: Annotated[str, Meta(max_length=64)] = ""
    seen: Annotated[int, Meta(ge=0)] | None = None


class SetKnobs(Change, frozen=True, kw_only=True):
    """Set knobs: all of `changes`, or none if one of them is wrong.

    Attributes:
        expected_version: version of the knobs that the client has seen; at any other, the command
            is refused, so that it does not overwrite the change of another client.
        lease_s: unless a change with `lease_s` renews the lease within that time, the engine
            restores the values from before it.
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
    """Where a prefill engine keeps the KV of a request until the decode engine has loaded it."""

    file: Annotated[str, Meta(pattern="^stepscope-kv-[0-9a-f]{32}$")]
    layout: Annotated[str, Meta(max_length=64)]  # the model and the shape of its KV blocks
    frames: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=1_000_000)]
    stamp: Annotated[int, Meta(ge=1)]  # the frames carry it while they hold this request


class HandedOver(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of a request that a prefill engine hands over, with times of `time.monotonic_ns`.

    Its keys and values are those of all tokens but the newest, which the decode engine computes.
    """

    engine: Name  # the prefill engine
    request_id: Annotated[int, Meta(ge=0)]  # its number in the prefill engine
    output_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1_000_000)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # for sampling its further tokens
    arrival_ns: int
    first_token_ns: int
    last_token_ns: int
    sent_ns: int  # when its keys and values were copied to the shared memory
    kv: KVTicket


class Submit(Command, frozen=True, kw_only=True):
    """Send a request: its prompt as text, as token ids or as a conversation (exactly one of them).

    A client without the tokenizer may send more than `max_prompt_tokens`: the engine cuts it there.
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
    stream: bool = True  # an Output for each step that adds tokens; else one Output at the end
    with_text: bool = True
    # Set by a prefill engine that hands the request over to an engine with the role "decode".
    handed_over: HandedOver | UnsetType = UNSET


class Abort(Change, frozen=True, kw_only=True):
    doing = "aborting requests"

    request_id: int


class ResetPrefixCache(Change, frozen=True):
    doing = "resetting the prefix cache"


class SetWorkload(Change, frozen=True, kw_only=True):
    """Start (or replace) the workload that the engine sends to itself; None stops it."""

    doing = "changing the workload"

    workload: WorkloadSpec | None = None


class Drain(Change, frozen=True):
    """Refuse new requests and finish those the engine has. `Resume` lets new ones in again."""

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
    | Abort
    | ResetPrefixCache
    | SetWorkload
    | Drain
    | Shutdown
)

_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def encode(command: Command) -> bytes:
    return msgspec.msgpack.encode(command)


def decode_command(payload: bytes) -> AnyCommand:
    """Decode a command. Raises msgspec.DecodeError (malformed) or ValidationError (wrong field)."""
    if len(payload) > MAX_COMMAND_BYTES:
        raise msgspec.ValidationError(
            f"command of {len(payload)} bytes, at most {MAX_COMMAND_BYTES} are taken"
        )
    return decode_bounded(_decoder, payload)
