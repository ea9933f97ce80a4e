"""Reads a torch profiler's trace of vLLM, and finds its steps in a recording.

vLLM names each step in the trace, with its requests and tokens (`execute_context_1(64)_...`). What
was launched until the next step began is of that step, sampling included. A trace of a CPU has no
kernels: the operators' own times count there.
"""

import gzip
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.messages import indexes
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.session.index import IndexRows

KernelKind: TypeAlias = Literal["attention", "linear", "communication", "sampling", "other"]
KERNEL_KINDS: tuple[KernelKind, ...] = get_args(KernelKind)

# A name is of the first kind that it matches.
_KINDS: tuple[tuple[KernelKind, "re.Pattern[str]"], ...] = (
    ("communication", re.compile(
        r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device|quick_?reduce"
        r"|gloo|c10d", re.I)),
    ("attention", re.compile(r"attn|attention|fmha|flash|(?<![a-z])m[hl]a|paged|kv_?cache", re.I)),
    ("linear", re.compile(
        r"gemm|gemv|cijk|cutlass|cublas|matmul|addmm|::b?mm\b|linear|nvjet|marlin|machete|moe|gating"
        r"|splitk|scaled_mm|onednn", re.I)),
    ("sampling", re.compile(
        r"softmax|arg_?max|top_?[kp]|multinomial|sampl|gumbel|penalt|reject|sort|exponential",
        re.I)),
)  # fmt: skip
_STEP = re.compile(
    r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^)]*\)_generation_(\d+)\((?:sq)?(\d+)"
)
_LEAST = 0.8  # of the steps of a trace must be those of the recording
_COLUMNS = (
    *("step", "num_rows", "num_decode_rows", "num_prefill_tokens", "num_decode_tokens"),
    *("schedule_start_ns", "tokens_ns"),
)
_SKIPPED = (b'"python_function"', b'"ac2g"')  # most of a trace


class ProfiledStep(NamedTuple):
    """A step in a trace. `step` and `ns` are what its recording says, once it is found there."""

    batch: tuple[int, int, int, int]  # prefilling requests, their tokens, decoding ones, theirs
    start_ns: int  # when its worker began it, by the trace's clock
    kernel_ns: dict[KernelKind, int]  # how long kernels of each kind ran
    busy_ns: int  # how long any ran: less than their sum if some ran side by side
    step: int = -1
    ns: int = 0

    @property
    def host_ns(self) -> int:
        """How long nothing of it ran on the device: scheduling, launches, waits."""
        return max(0, self.ns - self.busy_ns)


class TorchTrace(NamedTuple):
    steps: list[ProfiledStep]
    wall_offset_ns: int | None  # Unix time minus the trace's clock; None: the trace does not tell
    device: str  # what the kernels ran on; empty: a CPU, whose operators count instead
    rank: int
    kernels: "Counter[tuple[KernelKind, str]]"  # kind and name: how long it ran


class _Args(msgspec.Struct):
    correlation: int | None = None


class _Event(msgspec.Struct):
    ts: float = 0.0  # microseconds
    dur: float = 0.0
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    args: _Args = msgspec.field(default_factory=_Args)

    @property
    def start_ns(self) -> int:
        return round(self.ts * 1000)

    @property
    def ns(self) -> int:
        return round(self.dur * 1000)


class _File(msgspec.Struct, rename="camel"):
    trace_events: list[msgspec.Raw]
    base_time_nanoseconds: int | None = None
    device_properties: list[dict[str, Any]] = []
    distributed_info: dict[str, Any] = {}


@dataclass(slots=True)
class _Ran:
    """A kernel, or an operator: `own_ns` is without those that it called."""

    name: str
    begun_ns: int  # when it was launched
    start_ns: int
    end_ns: int
    own_ns: int


def kind_of(name: str) -> KernelKind:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def read_trace(path: Path) -> TorchTrace:
    """Read a trace, compressed or not. Raises RecordingError: it is none, or names no step."""
    of: dict[str, list[_Event]] = defaultdict(list)  # by category
    decoder = msgspec.json.Decoder(_Event)
    try:
        payload = path.read_bytes()
        if payload[:2] == b"\x1f\x8b":
            payload = gzip.decompress(payload)
        file = msgspec.json.decode(payload, type=_File)
        for raw in file.trace_events:
            if not any(name in bytes(raw) for name in _SKIPPED):
                event = decoder.decode(raw)
                if event.ph == "X":
                    of[event.cat].append(event)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error
    except (EOFError, ValueError) as error:
        raise RecordingError(f"{path}: expected a torch profiler's trace: {error}") from error
    begun = sorted(
        (each.start_ns, (a, b, c, d))
        for each in of["user_annotation"]
        if (found := _STEP.match(each.name)) is not None
        for a, b, c, d in [map(int, found.groups())]
        if a or b or c or d
    )
    if not begun:
        raise RecordingError(f"{path}: expected a trace of vLLM, got one that names no step of it")
    launched = {e.args.correlation: e.start_ns for e in of["cuda_runtime"] + of["cuda_driver"]}
    ran = [
        _Ran(e.name, launched.get(e.args.correlation, start_ns), start_ns, start_ns + e.ns, e.ns)
        for e in of["kernel"] + of["gpu_memcpy"] + of["gpu_memset"]
        for start_ns in [e.start_ns]
    ]
    names = {str(each.get("name")) for each in file.device_properties}
    device = (" and ".join(sorted(names)) or "GPU") if ran else ""
    steps, kernels = _divided(begun, ran or _operators(of["cpu_op"]))
    rank = int(file.distributed_info.get("rank", 0))
    return TorchTrace(steps, file.base_time_nanoseconds, device, rank, kernels)


def matched_steps(trace: TorchTrace, recording: Recording) -> tuple[list[ProfiledStep], int | None]:
    """Find where in a recording the steps of a trace have the same batches, one after the other.

    Returns them, and how long after its schedule the trace has a step begin, in nanoseconds of the
    wall clocks, at the median; None: the trace does not tell them.

    Raises RecordingError: hardly any have; the two are not of one run.
    """
    known: dict[int, tuple[tuple[int, ...], int, int]] = {}  # batch, start, end
    with_batch: dict[object, list[int]] = defaultdict(list)
    for _, index in indexes(recording):
        table = IndexRows(index).steps()
        for row in zip(*(table.column(name) for name in _COLUMNS), strict=True):
            step, num_rows, num_decodes, num_prefill, num_decode, start_ns, end_ns = row
            batch = num_rows - num_decodes, num_prefill, num_decodes, num_decode
            known[step] = batch, start_ns, end_ns
            with_batch[batch].append(step)
    votes: Counter[int] = Counter()  # for the recorded step with which the trace begins
    for number, profiled in enumerate(trace.steps):
        votes.update(step - number for step in with_batch[profiled.batch])
    if not votes:
        raise RecordingError("no step of the trace has the batch of a recorded one")
    wall_ns = recording.info.wall_ns - recording.info.monotonic_ns - (trace.wall_offset_ns or 0)

    def apart_ns(first: int) -> int:
        """By how much the wall clocks differ at the median if the trace begins with this step."""
        pairs = [pair for pair in enumerate(trace.steps, first) if pair[0] in known]
        return round(median(abs(each.start_ns - known[n][1] - wall_ns) for n, each in pairs))

    # Steps of decodes alone look alike: of places that fit as well, the nearest in time.
    most = max(votes.values())
    first = min((each for each, number in votes.items() if number == most), key=apart_ns)
    steps = [
        each._replace(step=number, ns=known[number][2] - known[number][1])
        for number, each in enumerate(trace.steps, first)
        if number in known and known[number][0] == each.batch
    ]
    if len(steps) < _LEAST * len(trace.steps):
        raise RecordingError(
            f"are both of one run? Of {len(trace.steps):,} steps of the trace, {len(steps):,} have "
            "the batches of recorded ones"
        )
    return steps, apart_ns(first) if trace.wall_offset_ns else None


def _operators(events: Iterable[_Event]) -> list[_Ran]:
    """Operators with their own time: without the operators that they called."""
    found: list[_Ran] = []
    callers_of: dict[object, list[_Ran]] = defaultdict(list)  # by thread
    for event in sorted(events, key=lambda each: (each.ts, -each.dur)):
        start_ns, ns = event.start_ns, event.ns
        callers = callers_of[event.pid, event.tid]
        while callers and callers[-1].end_ns <= start_ns:
            callers.pop()
        if callers:
            callers[-1].own_ns = max(0, callers[-1].own_ns - ns)
        callers.append(_Ran(event.name, start_ns, start_ns, start_ns + ns, ns))
        found.append(callers[-1])
    return found


def _divided(
    begun: list[tuple[int, tuple[int, int, int, int]]], ran: Iterable[_Ran]
) -> tuple[list[ProfiledStep], "Counter[tuple[KernelKind, str]]"]:
    starts = [start_ns for start_ns, _ in begun]
    of_step: dict[int, list[_Ran]] = defaultdict(list)
    for each in ran:
        of_step[bisect_right(starts, each.begun_ns) - 1].append(each)
    steps, kernels = [], Counter[tuple[KernelKind, str]]()
    for number, (start_ns, batch) in enumerate(begun):
        kernel_ns, busy_ns, until_ns = dict.fromkeys(KERNEL_KINDS, 0), 0, 0
        for each in sorted(of_step[number], key=lambda each: each.start_ns):
            kind = kind_of(each.name)
            kernel_ns[kind] += each.own_ns
            kernels[kind, each.name] += each.own_ns
            busy_ns += max(0, each.end_ns - max(each.start_ns, until_ns))
            until_ns = max(until_ns, each.end_ns)
        steps.append(ProfiledStep(batch, start_ns, kernel_ns, busy_ns))
    return steps, kernels
