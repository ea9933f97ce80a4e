"""Telemetry: every message the engine publishes, and how it is framed.

A message is three frames, `[topic, sequence (u64, big-endian), msgpack payload]`. A publisher
numbers the messages of all its topics in one sequence, so a subscriber to everything sees a lost
message as a gap. Times are the engine's `time.monotonic_ns()` unless a name says `wall`. `None`
means that the source cannot know the value; readers show it as unknown, never as zero.

The rows of `wire_rows` are array-encoded, and new fields go to their end. Other messages are
map-encoded, so that an older reader skips the fields it does not know. Other modules import
telemetry types from here, those of `wire_events` and `wire_rows`, too.
"""
# ruff: noqa: F403, F405 - mypy knows the names

from collections.abc import Callable
from typing import ClassVar, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.wire_events import *
from stepscope.engine.protocol.wire_rows import *

SCHEMA_VERSION = 1
MAX_TELEMETRY_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")
KnobValue: TypeAlias = bool | int | float | str


class Telemetry(Struct, frozen=True, tag_field="type", tag=True, omit_defaults=True):
    """Base of all published messages."""

    topic: ClassVar[bytes]


class KnobSpec(Struct, frozen=True):
    """Description of one knob, for people and for clients that do not import the engine."""

    name: str
    kind: Literal["int", "float", "bool", "choice"]
    default: KnobValue
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    help: str = ""


class StepCosts(Struct, frozen=True, kw_only=True):
    """Step times that the engine measured when it started.

    Other programs may have run on the machine meanwhile.
    """

    num_streams: int  # decoding requests in the decode step that was measured
    decode_ms: float  # median time of that step
    num_prefill_tokens: int  # prompt tokens in the prefill step that was measured
    prefill_ms: float  # time of that step
    stream_ms: float | None = None  # time of a step that decodes one request; None: not measured


class EngineInfo(Telemetry, frozen=True, kw_only=True):
    """Name, model, settings and abilities of the engine.

    Published at start and every few seconds.
    """

    topic = b"info"

    engine_id: str  # new at every start of an engine
    name: str
    schema_version: int = SCHEMA_VERSION
    software_version: str
    pid: int | None = None
    model: str
    architecture: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None  # None: an old recording, or not known
    device: str | None = None
    implementation: str | None = None  # whose layers run, and how
    attention_backend: str | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    num_parameters: int | None = None
    weight_bytes: int | None = None
    flops_per_token: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None  # usable ones
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None  # capacity
    max_num_seqs: int | None = None  # capacity
    chars_per_token: float | None = None  # of English prose, for clients without the tokenizer
    knobs: tuple[KnobSpec, ...] = ()
    telemetry_endpoint: str = ""
    control_endpoint: str = ""
    http_endpoint: str | None = None  # HOST:PORT where the engine's own HTTP server listens
    monotonic_ns: int  # the same instant as `wall_ns`
    wall_ns: int
    with_tokens: bool = False  # prompts and outputs are in its telemetry
    config_hash: str | None = None
    overlap: bool | None = None  # steps may be prepared while the one before runs (`hidden_ns`)
    step_costs: StepCosts | None = None  # None: the engine did not measure
    bundles: bool = False  # outputs may come in a `Bundle`
    keeps_snapshots: bool = False  # it knows `GetKeptSnapshot`
    engine: str | None = None  # the attached engine ("vllm"); None: our own engine
    engine_version: str | None = None  # of the attached engine
    data_parallel_rank: int | None = None  # None: it is the only replica
    data_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    role: str | None = None  # prefill or decode; None: it does both
    decode_engine: str | None = None  # where a prefill engine hands requests over to; None: nowhere
    kv_layout: str | None = None  # engines hand KV blocks over only if their layouts are equal
    simulated: str | None = None  # the model of step times; None: a real model ran in real time
    # Each `StepRecord` sums up about this many seconds; None: each is one forward step.
    totals_every_s: float | None = None
    slo_ttft_ms: float | None = None  # service levels it was started with; None: it has none
    slo_itl_ms: float | None = None
    imported: str | None = None  # the file of another tool it was read from; None: it is an engine
    kv_groups: tuple[KVGroup, ...] | None = None  # None: all layers hold the whole context
    # Tokens of requests of `max_model_len` that fit at once; None: as many as the blocks have.
    kv_tokens: int | None = None
    pipeline_parallel_size: int | None = None
    # Tokens of the largest step that can run in a CUDA graph; None: there are none, or not known.
    max_graph_tokens: int | None = None

    @property
    def publishes(self) -> bool:
        """Whether the engine publishes telemetry; with `--no-telemetry` it does not.

        An engine with a control endpoint but no telemetry endpoint publishes nothing. An engine
        with neither, as in a recording made by another program, counts as publishing.
        """
        return bool(self.telemetry_endpoint) or not self.control_endpoint

    def wall_at(self, time_ns: int) -> int:
        """Return the Unix time of a time by the engine's clock, both in nanoseconds."""
        return self.wall_ns + time_ns - self.monotonic_ns


class KnobsChanged(Telemetry, frozen=True, kw_only=True):
    topic = b"knobs"

    version: int
    effective_step: int  # the first step scheduled with the new values
    who: str
    old: dict[str, KnobValue]
    new: dict[str, KnobValue]
    time_ns: int


class StepRecord(Telemetry, frozen=True, kw_only=True):
    """One forward step: the requests in its batch, its cost, and the KV blocks that changed.

    The times of two steps never overlap. If a step was prepared while the step before it ran, its
    times of scheduling and launch are set no earlier than that step's `tokens_ns`; `hidden_ns` is
    the preparation time that delayed no step. Blocks, running and waiting requests are recorded as
    if the step had been scheduled after the end of the step before it.
    """

    topic = b"step"

    step: int
    schedule_start_ns: int
    schedule_end_ns: int | None = None
    launch_ns: int | None = None  # the model was started
    tokens_ns: int  # the sampled tokens were known on the host
    device_ns: int | None = None  # time the accelerator was busy
    knobs_version: int | None = None
    token_budget: int | None = None
    max_num_seqs: int | None = None
    num_prefill_tokens: int  # recomputed tokens included
    num_decode_tokens: int  # drafts included, accepted or not
    num_padded_tokens: int | None = None
    batch: list[BatchRow] | None = None
    kv: KVCounts | None = None
    moves: list[BlockMove] = []
    num_running: int
    num_waiting: int
    waiting_reasons: dict[str, int] | None = None
    events: list[RequestEvent] = []
    num_dropped: int = 0  # telemetry messages dropped by the publisher so far
    # Only with `with_tokens`, one entry for each row, None where no token was sampled:
    token_ids: list[int | None] | None = None
    texts: list[str | None] | None = None  # output text that became certain with the token
    # Time from the start of scheduling until all was launched, while the step before it ran.
    # None: it was prepared after that step, or the engine does not say (`EngineInfo.overlap`).
    hidden_ns: int | None = None
    # Tokens of requests that had ended before the step computed them. No other count includes
    # them, and `batch` has no rows of them. None: the step could waste none.
    num_wasted_tokens: int | None = None
    token_limit: int | None = None  # token budget that device memory allows for now, if smaller
    totals: Totals | None = None  # of an engine that does not name requests, or blocks
    drafts: list[DraftRow] | None = None  # None: nothing was guessed, or the engine does not say
    # The kind of CUDA graph that the step ran in: full, piecewise or none. None: the device has no
    # graphs, or the engine does not say.
    cuda_graph: str | None = None
    num_graph_padding: int | None = None  # tokens that filled it up; they are not of the budget
    held: list[HeldRow] | None = None  # changes only, until a request is admitted; None: none
    held_prefills: bool = False  # it left prefills out on purpose (`prefill_schedule_interval`)
    front: list[FrontEnd] | None = None  # what front ends told meanwhile; None: nothing
    kv_groups: list[GroupCounts] | None = None  # by the group's place in `EngineInfo.kv_groups`
    move_groups: bytes | None = None  # the group of each block in `moves`, one byte each
    kv_transfers: KVTransfers | None = None  # None: no block waits for one
    hold_ups: list[HoldUp] | None = None  # in the step or before it; None: none is known
    ranks: list[RankTimes] | None = None  # in order; None: it has one, or they are unknown


class StepInFlight(Telemetry, frozen=True, kw_only=True):
    """Reports a step that takes long, several times a second while it runs.

    An observer's state does not change by it: the record of the step follows when the step has
    ended.
    """

    topic = b"in_flight"

    step: int
    since_ns: int  # start of its scheduling, or the end of the step before it if that is later
    time_ns: int  # when it was still running
    num_prefill_tokens: int
    num_decode_tokens: int
    num_decodes: int  # requests that decode in it
    prefills: list[PrefillPart] = []  # the largest ones
    token_budget: int | None = None


class LeasedKnobs(Struct, frozen=True):
    """Knobs that a client has leased, with their values from before.

    The engine restores those values when the client stops renewing the lease.
    """

    who: str
    before: dict[str, KnobValue]  # the values to put back


class ControlCounts(Struct, frozen=True, omit_defaults=True):
    """What the control socket has refused so far."""

    bad: int = 0  # messages that were no command
    limited: int = 0  # commands beyond the rate limit of their client
    denied: int = 0  # commands that need an operator's key, from viewers
    keyless: int = 0  # connections without an authorised key


EngineState: TypeAlias = Literal["running", "idle", "paused", "draining", "stopped"]


class EngineStatus(Telemetry, frozen=True, kw_only=True):
    """Heartbeat, once a second, and at once if the state changes or an idle engine has news.

    Reports what happened outside of any step.
    """

    topic = b"status"

    time_ns: int
    state: EngineState
    step: int  # the last step that ran, -1 before the first
    num_running: int
    num_waiting: int
    kv: KVCounts | None = None
    moves: list[BlockMove] = []
    events: list[RequestEvent] = []
    num_dropped: int = 0
    workload: str | None = None  # the engine's own workload in words; None if none runs
    control: ControlCounts | None = None  # None: nothing was refused
    # The fields of its `WorkloadSpec` that have a value; None: no workload, or an unknown one.
    workload_spec: dict[str, KnobValue] | None = None
    leased: LeasedKnobs | None = None
    totals: Totals | None = None  # the share of the KV cache in use, if `kv` is unknown
    held: list[HeldRow] | None = None  # as in `StepRecord`
    front: list[FrontEnd] | None = None  # as in `StepRecord`
    kv_groups: list[GroupCounts] | None = None  # as in `StepRecord`, and so are these:
    move_groups: bytes | None = None
    kv_transfers: KVTransfers | None = None


class Audited(Telemetry, frozen=True, kw_only=True):
    """Entry of the audit trail: a change, or a refused command. Numbered from 1 without gaps."""

    topic = b"audit"

    number: int
    command: str  # SetKnobs, Pause, ...
    who: str  # the name the client gave itself
    time_ns: int
    key: str | None = None  # the client's key; None if the engine asks for none
    effective_step: int | None = None  # the first step with the change; None: refused
    version: int | None = None  # of the knobs, after a change of them
    old: dict[str, KnobValue] | None = None
    new: dict[str, KnobValue] | None = None
    detail: str = ""
    code: str = ""  # the error code of a refusal; empty if the change was made
    count: int = 1  # commands that this entry stands for


class PauseSpan(Struct, frozen=True, array_like=True):
    """A stretch of engine time without a step because of a pause."""

    start_ns: int
    end_ns: int | None = None  # None while the pause lasts


class Snapshot(Telemetry, frozen=True, kw_only=True):
    """The whole state right after message `sequence` was published, for a late observer."""

    topic = b"keyframe"

    sequence: int
    step: int
    time_ns: int
    info: EngineInfo
    knobs: dict[str, KnobValue]
    knobs_version: int
    state: EngineState
    requests: list[RequestView]
    blocks: list[BlockRun] | None
    kv: KVCounts | None
    num_dropped: int = 0
    workload: str | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    waiting_reasons: dict[str, int] | None = None
    control: ControlCounts | None = None
    audit: list[Audited] | None = None  # the last entries
    transcripts: list[Transcript] | None = None  # only with `with_tokens`
    pauses: list[PauseSpan] | None = None  # by the operator, as many as are kept; None: unknown
    workload_spec: dict[str, KnobValue] | None = None  # as in `EngineStatus`
    in_flight: StepInFlight | None = None  # only in a snapshot that an observer made
    totals: Totals | None = None  # of the last step
    leased: LeasedKnobs | None = None
    kv_groups: list[GroupCounts] | None = None  # as in `StepRecord`
    block_groups: bytes | None = None  # the group of each block, one byte each
    kv_transfers: KVTransfers | None = None  # as in `StepRecord`


class Mark(Telemetry, frozen=True, kw_only=True):
    """A person's note about a step. An observer makes it; recordings keep it."""

    topic = b"mark"

    step: int
    time_ns: int
    text: str
    who: str


TelemetryMessage: TypeAlias = (
    EngineInfo | KnobsChanged | StepRecord | StepInFlight | EngineStatus | Snapshot | Mark | Audited
)

TOPICS: dict[type[Telemetry], bytes] = {kind: kind.topic for kind in get_args(TelemetryMessage)}

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[TelemetryMessage] = msgspec.msgpack.Decoder(TelemetryMessage)


def encode(message: Telemetry) -> bytes:
    """Encode a telemetry message as msgpack."""
    return _encoder.encode(message)


encode_into: Callable[[Telemetry, bytearray], None] = _encoder.encode_into
"""Like `encode`, but writes into a buffer, over its old content."""


def decode(payload: bytes | memoryview) -> TelemetryMessage:
    """Decode a telemetry message from msgpack.

    Raises:
        msgspec.DecodeError: malformed msgpack, or (`msgspec.ValidationError`) a wrong field; the
            error names the path to it.
    """
    if len(payload) > MAX_TELEMETRY_BYTES:
        raise msgspec.ValidationError(
            f"message of {len(payload)} bytes, at most {MAX_TELEMETRY_BYTES} are taken"
        )
    return decode_bounded(_decoder, payload)


def decode_bounded(decoder: msgspec.msgpack.Decoder[_T], payload: bytes | memoryview) -> _T:
    """Decode untrusted bytes. Raises msgspec.DecodeError, whatever is wrong with them."""
    try:
        return decoder.decode(payload)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(f"malformed message: {error}") from error


def sequence_frame(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def sequence_of(frame: bytes) -> int:
    """Return the sequence number in a message's second frame.

    Raises ValueError if the frame is not eight bytes.
    """
    if len(frame) != 8:
        raise ValueError(f"sequence frame of {len(frame)} bytes, expected 8")
    return int.from_bytes(frame, "big")
