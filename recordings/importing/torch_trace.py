"""Reads a torch profiler's trace of vLLM, and finds its steps in a recording.

vLLM names each step in the trace, with its requests and tokens (`execute_context_1(64)_...`). What
was launched until the next step began is of that step, sampling included. A trace of a CPU has no
kernels: the operators' own times count there.
"""

import gzip
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.indexes import indexes
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
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LEAST = 0.8  # of the steps of a trace must be those of the recording
_COLUMNS = (
    *("step", "num_rows", "num_decode_rows", "num_prefill_tokens", "num_decode_tokens"),
    *("schedule_start_ns", "tokens_ns"),
)
_SKIPPED = (b'"python_function"', b'"ac2g"')  # most of a trace


class ProfiledStep(NamedTuple):
    """A step in a trace, in nanoseconds.

    Attributes:
        batch: its prefilling requests, their tokens, its decoding requests, their tokens.
        start_ns: when its worker began it, by the trace's clock.
        kernel_ns: how long kernels of each kind ran.
        busy_ns: how long any ran: less than their sum if some ran side by side.
    """

    batch: tuple[int, int, int, int]
    start_ns: int
    kernel_ns: dict[KernelKind, int]
    busy_ns: int


class TorchTrace(NamedTuple):
    """Attributes:
    wall_offset_ns: Unix time minus the trace's clock; None if the trace does not tell.
    device: what the kernels ran on; empty: a CPU, whose operators count instead.
    kernels: for each kernel, its kind and how long it ran.
    """

    steps: list[ProfiledStep]
    wall_offset_ns: int | None
    device: str
    rank: int
    kernels: "Counter[tuple[KernelKind, str]]"


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """A recorded step, and what ran in it, in nanoseconds.

    Attributes:
        ns: how long the step took, by the recording.
        host_ns: how long nothing of it ran on the device: scheduling, launches, waits.
    """

    step: int
    ns: int
    profiled: ProfiledStep

    @property
    def host_ns(self) -> int:
        return max(0, self.ns - self.profiled.busy_ns)

    @property
    def kernel_ns(self) -> dict[KernelKind, int]:
        return self.profiled.kernel_ns

    @property
    def has_prefill(self) -> bool:
        return self.profiled.batch[0] > 0


@dataclass(frozen=True, slots=True)
class ProfileMatch:
    """The steps of a trace that were found in a recording.

    Attributes:
        num_profiled: all steps of the trace.
        clock_ns: how long after its schedule the trace has a step begin, at the median, by wall
            clocks; None if the trace does not tell them.
    """

    steps: list[KernelTimes]
    num_profiled: int
    clock_ns: int | None


class _Head(msgspec.Struct):
    traceEvents: list[msgspec.Raw]  # noqa: N815
    baseTimeNanoseconds: int | None = None  # noqa: N815
    deviceProperties: list[dict[str, Any]] = []  # noqa: N815
    distributedInfo: dict[str, Any] = {}  # noqa: N815


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


class _Ran(NamedTuple):
    """A kernel, or an operator without those that it called."""

    name: str
    begun_ns: int  # when it was launched
    start_ns: int
    end_ns: int
    own_ns: int


def kind_of(name: str) -> KernelKind:
    """The kind of a kernel or of an operator, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def read_trace(path: Path) -> TorchTrace:
    """Read a trace as torch writes it, compressed or not.

    Raises:
        RecordingError: it cannot be read, or names no step.
    """
    head = _head(path)
    by_category = _events(path, head.traceEvents)
    begun = [
        (_ns(each.ts), tuple(map(int, found.groups())))
        for each in by_category["user_annotation"]
        if (found := _STEP.match(each.name)) is not None
    ]
    begun = sorted(each for each in begun if any(each[1]))
    if not begun:
        raise RecordingError(f"{path}: expected a trace of vLLM, got one that names no step of it")
    launched = {
        each.args.correlation: _ns(each.ts)
        for category in ("cuda_runtime", "cuda_driver")
        for each in by_category[category]
    }
    on_device = [each for category in _DEVICE for each in by_category[category]]
    ran = [
        _Ran(each.name, launched.get(each.args.correlation, _ns(each.ts)), *_span(each))
        for each in on_device
    ] or list(_operators(by_category["cpu_op"]))
    steps, kernels = _divided(begun, ran)
    names = {str(each.get("name")) for each in head.deviceProperties}
    device = (" and ".join(sorted(names)) or "GPU") if on_device else ""
    return TorchTrace(
        steps, head.baseTimeNanoseconds, device, int(head.distributedInfo.get("rank", 0)), kernels
    )


def matched_steps(trace: TorchTrace, recording: Recording) -> ProfileMatch:
    """Find where in a recording the steps of a trace have the same batches, one after the other.

    Raises RecordingError: hardly any have; the two are not of one run.
    """
    known: dict[int, tuple[tuple[int, int, int, int], int, int]] = {}
    with_batch: dict[object, list[int]] = defaultdict(list)
    for _, index in indexes(recording):
        table = IndexRows(index).steps()
        for row in zip(*(table.column(name) for name in _COLUMNS), strict=True):
            step, num_rows, num_decodes, num_prefill, num_decode, start_ns, end_ns = row
            batch = num_rows - num_decodes, num_prefill, num_decodes, num_decode
            known[step] = batch, start_ns, end_ns
            with_batch[batch].append(step)
    votes: Counter[int] = Counter()
    for number, profiled in enumerate(trace.steps):
        votes.update(step - number for step in with_batch[profiled.batch])
    if not votes:
        raise RecordingError("no step of the trace has the batch of a recorded one")

    wall_ns = recording.info.wall_ns - recording.info.monotonic_ns - (trace.wall_offset_ns or 0)

    def apart_ns(shift: int) -> int:
        """By how much the wall clocks differ at the median if the trace begins with this step."""
        return round(
            median(
                abs(profiled.start_ns - known[shift + number][1] - wall_ns)
                for number, profiled in enumerate(trace.steps)
                if shift + number in known
            )
        )

    # Steps of decodes alone look alike: of places that fit as well, the nearest in time.
    most = votes.most_common(1)[0][1]
    shift = min((each for each, number in votes.items() if number == most), key=apart_ns)
    steps = [
        KernelTimes(shift + number, known[shift + number][2] - known[shift + number][1], profiled)
        for number, profiled in enumerate(trace.steps)
        if shift + number in known and known[shift + number][0] == profiled.batch
    ]
    if len(steps) < _LEAST * len(trace.steps):
        raise RecordingError(
            f"are both of one run? Of {len(trace.steps):,} steps of the trace, {len(steps):,} have "
            "the batches of recorded ones"
        )
    return ProfileMatch(steps, len(trace.steps), apart_ns(shift) if trace.wall_offset_ns else None)


def _head(path: Path) -> _Head:
    try:
        payload = path.read_bytes()
        if payload[:2] == b"\x1f\x8b":
            payload = gzip.decompress(payload)
        return msgspec.json.decode(payload, type=_Head)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error
    except (EOFError, ValueError) as error:
        raise RecordingError(f"{path}: expected a torch profiler's trace: {error}") from error


def _events(path: Path, raw: Iterable[msgspec.Raw]) -> dict[str, list[_Event]]:
    """The complete events that matter, by category."""
    found: dict[str, list[_Event]] = defaultdict(list)
    decoder = msgspec.json.Decoder(_Event)
    for each in raw:
        if any(name in bytes(each) for name in _SKIPPED):
            continue
        try:
            event = decoder.decode(each)
        except msgspec.ValidationError as error:
            raise RecordingError(f"{path}, an event: {error}") from error
        if event.ph == "X":
            found[event.cat].append(event)
    return found


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _span(event: _Event) -> tuple[int, int, int]:
    start_ns, ns = _ns(event.ts), _ns(event.dur)
    return start_ns, start_ns + ns, ns


def _operators(events: Iterable[_Event]) -> Iterator[_Ran]:
    """Operators with their own time: without the operators that they called."""
    threads: dict[object, list[_Event]] = defaultdict(list)
    for event in events:
        threads[event.pid, event.tid].append(event)
    for of_thread in threads.values():
        open_: list[list[Any]] = []  # name, start, end, time of what it called
        for event in sorted(of_thread, key=lambda each: (each.ts, -each.dur)):
            start_ns, end_ns, ns = _span(event)
            while open_ and open_[-1][2] <= start_ns:
                yield _closed(open_.pop())
            if open_:
                open_[-1][3] += ns
            open_.append([event.name, start_ns, end_ns, 0])
        while open_:
            yield _closed(open_.pop())


def _closed(operator: list[Any]) -> _Ran:
    name, start_ns, end_ns, called_ns = operator
    return _Ran(name, start_ns, start_ns, end_ns, max(0, end_ns - start_ns - called_ns))


def _divided(
    begun: list[tuple[int, tuple[int, ...]]], ran: Iterable[_Ran]
) -> tuple[list[ProfiledStep], "Counter[tuple[KernelKind, str]]"]:
    """Put what ran into the steps that launched it."""
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
        a, b, c, d = batch
        steps.append(ProfiledStep((a, b, c, d), start_ns, kernel_ns, busy_ns))
    return steps, kernels
