"""Telemetry: every message the engine publishes, and how it is framed.

A message is three frames, `[topic, sequence (u64, big-endian), msgpack payload]`. One publisher
counts all its topics with one sequence, so a subscriber to everything sees a lost message as a
gap. Times are the engine's `time.monotonic_ns()` unless a name says `wall`. `None` means that the
source cannot know the value; readers draw it as unknown, never as zero.

Only the rows of `wire_rows` are array-encoded, and they grow at the end only; everything else is
map-encoded, so that an older reader skips the fields it does not know. All other
modules import telemetry from here.
"""

from collections.abc import Callable
from typing import ClassVar, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.pause_trail import PauseSpan as PauseSpan
from stepscope.engine.protocol.wire_events import Aborted as Aborted
from stepscope.engine.protocol.wire_events import Admitted as Admitted
from stepscope.engine.protocol.wire_events import Arrived as Arrived
from stepscope.engine.protocol.wire_events import Event as Event
from stepscope.engine.protocol.wire_events import Finished as Finished
from stepscope.engine.protocol.wire_events import FirstToken as FirstToken
from stepscope.engine.protocol.wire_events import Preempted as Preempted
from stepscope.engine.protocol.wire_events import Rejected as Rejected
from stepscope.engine.protocol.wire_events import RequestEvent as RequestEvent
from stepscope.engine.protocol.wire_events import RequestOrigin as RequestOrigin
from stepscope.engine.protocol.wire_requests import RequestStatus as RequestStatus
from stepscope.engine.protocol.wire_requests import RequestView as RequestView
from stepscope.engine.protocol.wire_requests import Transcript as Transcript
from stepscope.engine.protocol.wire_rows import CACHED as CACHED
from stepscope.engine.protocol.wire_rows import EMPTY as EMPTY
from stepscope.engine.protocol.wire_rows import BatchRow as BatchRow
from stepscope.engine.protocol.wire_rows import BlockMove as BlockMove
from stepscope.engine.protocol.wire_rows import BlockRun as BlockRun
from stepscope.engine.protocol.wire_rows import DraftRow as DraftRow
from stepscope.engine.protocol.wire_rows import KVCounts as KVCounts
from stepscope.engine.protocol.wire_rows import Phase as Phase
from stepscope.engine.protocol.wire_rows import PrefillPart as PrefillPart
from stepscope.engine.protocol.wire_rows import RowFlag as RowFlag
from stepscope.engine.protocol.wire_totals import LatencyEstimate as LatencyEstimate
from stepscope.engine.protocol.wire_totals import Totals as Totals

SCHEMA_VERSION = 1
MAX_TELEMETRY_BYTES = 64 * 1024 * 1024

_T = TypeVar("_T")
KnobValue: TypeAlias = bool | int | float | str


class Telemetry(Struct, frozen=True, tag_field="type", tag=True, omit_defaults=True):
    """Base of what is published."""

    topic: ClassVar[bytes]


class KnobSpec(Struct, frozen=True):
    """One live setting, described for people and for clients that never import the engine."""

    name: str
    kind: Literal["int", "float", "bool", "choice"]
    default: KnobValue
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    help: str = ""


class StepCosts(Struct, frozen=True, kw_only=True):
    """What steps took when the engine tried some at its start, beside whatever else ran then."""

    num_streams: int  # requests that each got a token of ...
    decode_ms: float  # ... a step that took so long, as a median
    num_prefill_tokens: int  # prompt tokens of ...
    prefill_ms: float  # ... a step that took so long
    stream_ms: float | None = None  # a step that gave one such request a token; None: not tried


class EngineInfo(Telemetry, frozen=True, kw_only=True):
    """Who is speaking. Published at start and every few seconds."""

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
    monotonic_ns: int  # these two name the same instant
    wall_ns: int
    with_tokens: bool = False  # prompts and outputs are in its telemetry
    config_hash: str | None = None
    overlap: bool | None = None  # steps may be prepared while the one before runs (`hidden_ns`)
    step_costs: StepCosts | None = None  # None: the engine did not try
    bundles: bool = False  # it knows `Submit.bundle`
    keeps_snapshots: bool = False  # it knows `GetKeptSnapshot`
    engine: str | None = None  # what was attached to ("vllm"); None: our own engine
    engine_version: str | None = None  # of what was attached to
    data_parallel_rank: int | None = None  # None: it is the only one
    data_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    role: str | None = None  # prefill or decode; None: it does both
    decode_engine: str | None = None  # whom a prefill engine hands over to; None: nobody, for now
    kv_layout: str | None = None  # what KV blocks must have in common to be handed over
    simulated: str | None = None  # by which model of step times; None: a model ran, and time passed
    # Each `StepRecord` sums up about so many seconds; None: it is one forward step.
    totals_every_s: float | None = None


class KnobsChanged(Telemetry, frozen=True, kw_only=True):
    topic = b"knobs"

    version: int
    effective_step: int  # the first step scheduled with the new values
    who: str
    old: dict[str, KnobValue]
    new: dict[str, KnobValue]
    time_ns: int


class StepRecord(Telemetry, frozen=True, kw_only=True):
    """One forward step: who was in the batch, what it cost, what moved.

    No instant belongs to two steps: of one that was prepared while the step before it ran, the
    times of scheduling and launch are no earlier than the other's `tokens_ns`, and `hidden_ns`
    says how long the preparation took that delayed no step. What moved, who ran and who waited
    is recorded as if the step had been scheduled after the one before it had ended.
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
    # Only of an engine with `with_tokens`, one entry a row, None where none was sampled:
    token_ids: list[int | None] | None = None
    texts: list[str | None] | None = None  # what the token made certain of the output's text
    # From the start of its scheduling until all of it was launched, while the step before it ran;
    # None: it was prepared after that one, or the engine does not say (`EngineInfo.overlap`).
    hidden_ns: int | None = None
    # In no other count, and `batch` is without their rows: of requests that had ended by the time
    # they were computed, or that the device had no memory for. None: there can be none.
    num_wasted_tokens: int | None = None
    token_limit: int | None = None  # what device memory holds steps to for now, below the knob
    totals: Totals | None = None  # of an engine that does not say who is in a step
    drafts: list[DraftRow] | None = None  # None: nothing was guessed, or the engine does not say
    # The kind of CUDA graph that the step ran in: full, piecewise or none. None: the device has no
    # graphs, or the engine does not say.
    cuda_graph: str | None = None


class StepInFlight(Telemetry, frozen=True, kw_only=True):
    """A step that takes long, published several times a second while it runs.

    It changes nothing that another message says; the record of the step comes when it has ended.
    """

    topic = b"in_flight"

    step: int
    since_ns: int  # its scheduling began, or the step before it had ended
    time_ns: int  # it still ran
    num_prefill_tokens: int
    num_decode_tokens: int
    num_decodes: int  # requests that are to get their next token
    prefills: list[PrefillPart] = []  # the largest ones
    token_budget: int | None = None


class LeasedKnobs(Struct, frozen=True):
    """Knobs that a client moves. They go back when it falls silent."""

    who: str
    before: dict[str, KnobValue]  # the values they go back to


class ControlCounts(Struct, frozen=True, omit_defaults=True):
    """What the control socket did not take, so far."""

    bad: int = 0  # messages that were no command
    limited: int = 0  # commands beyond what a client may send in its time
    denied: int = 0  # commands of viewers that only an operator may give
    keyless: int = 0  # connections without an authorised key


EngineState: TypeAlias = Literal["running", "idle", "paused", "draining", "stopped"]


class EngineStatus(Telemetry, frozen=True, kw_only=True):
    """A sign of life, once a second and at every change, and what happened outside of any step."""

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
    workload: str | None = None  # what the engine's own workload is, None when it has none
    control: ControlCounts | None = None  # None: nothing was refused
    # The fields of its `WorkloadSpec` that have a value; None: no workload, or it is unknown.
    workload_spec: dict[str, KnobValue] | None = None
    leased: LeasedKnobs | None = None


class Audited(Telemetry, frozen=True, kw_only=True):
    """A change of the engine, or a refused one. Numbered from 1 without gaps."""

    topic = b"audit"

    number: int
    command: str  # SetKnobs, Pause, ...
    who: str  # as they called themselves
    time_ns: int
    key: str | None = None  # the key they came in with, None where none is asked for
    effective_step: int | None = None  # the first step it holds for; None: refused
    version: int | None = None  # of the knobs, after a change of them
    old: dict[str, KnobValue] | None = None
    new: dict[str, KnobValue] | None = None
    detail: str = ""
    code: str = ""  # of the refusal, as in the answer; empty when it was done
    count: int = 1  # commands that this entry stands for


class Snapshot(Telemetry, frozen=True, kw_only=True):
    """Everything a late joiner needs, true right after the message `sequence` was published."""

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
    audit: list[Audited] | None = None  # the last ones
    transcripts: list[Transcript] | None = None  # only of an engine with `with_tokens`
    pauses: list[PauseSpan] | None = None  # the operator's, as far as they are kept; None: unknown
    workload_spec: dict[str, KnobValue] | None = None  # as in `EngineStatus`
    in_flight: StepInFlight | None = None  # of a snapshot that an observer made
    totals: Totals | None = None  # of the last step
    leased: LeasedKnobs | None = None


class Mark(Telemetry, frozen=True, kw_only=True):
    """A person's note at a step. Made by an observer and kept in recordings."""

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
    """Msgpack payload of one telemetry message."""
    return _encoder.encode(message)


encode_into: Callable[[Telemetry, bytearray], None] = _encoder.encode_into
"""As `encode`, in place of what is in the buffer."""


def decode(payload: bytes | memoryview) -> TelemetryMessage:
    """Inverse of `encode`.

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
    """Decode what a stranger sent: whatever is wrong with it is a msgspec.DecodeError."""
    try:
        return decoder.decode(payload)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(f"malformed message: {error}") from error


def sequence_frame(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def sequence_of(frame: bytes) -> int:
    """Sequence number of a second frame; ValueError if it is not eight bytes."""
    if len(frame) != 8:
        raise ValueError(f"sequence frame of {len(frame)} bytes, expected 8")
    return int.from_bytes(frame, "big")
