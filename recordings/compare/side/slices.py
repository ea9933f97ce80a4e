"""`RunSlices`: the latencies of a run and some of its counts, in equal slices of its time.

Waits close in time are alike: one long prompt delays all decodes beside it. So the error of a
figure is estimated from its variation between slices. Within a slice, waits are divided into strata
by kind of work.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeAlias, get_args

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.session.totals import TimeSlices
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.series.latency import LatencyKind

NUM_STRETCHES = 10  # of a run, for its waits
_BINS_PER_OCTAVE = 64  # about 1 % wide
_NUM_EXACT_BITS = _BINS_PER_OCTAVE.bit_length()

Stratum: TypeAlias = Hashable
Slice: TypeAlias = Counter[tuple[Stratum, int]]  # kind of work, bin of a wait -> number of waits
Stretches: TypeAlias = dict[LatencyKind, list[Slice]]  # of a whole run, at most `NUM_STRETCHES`


class GapWork(NamedTuple):
    """What the engine did while a request waited for its next token.

    Attributes:
        has_prefill: whether it computed prompt tokens, in the last step of the wait or before.
        decodes: size class of the number of tokens decoded in the step that ended the wait.
    """

    has_prefill: bool
    decodes: int


class WorkClass(NamedTuple):
    """How many prompt and decode tokens a step computed, as size classes."""

    prefill: int
    decodes: int


class WaitSlices(TimeSlices[tuple[Stratum, int]]):
    """One latency by the time each wait ended and by kind of work."""

    def add(self, time_ns: int, wait_ns: int, weight: int = 1, stratum: Stratum = 0) -> None:
        """Add a wait that ended `time_ns` after the run began. Call it in order of time."""
        self.at(time_ns)[stratum, bin_of(wait_ns)] += weight


class RunSlices:
    """All latencies of one run in slices. Only one thread may write."""

    def __init__(self) -> None:
        self._waits = {kind: WaitSlices() for kind in get_args(LatencyKind)}
        self._prefill_ns: int | None = None  # when the last step with prefill ended

    def take(self, record: StepRecord, outcome: Outcome, end_ns: int) -> None:
        """Add the latencies of a step that ended `end_ns` after the beginning of the run."""
        now_ns = record.tokens_ns
        if record.num_prefill_tokens:
            self._prefill_ns = now_ns
        prefill_ns = self._prefill_ns
        decodes = size_class(record.num_decode_tokens)
        work = WorkClass(size_class(record.num_prefill_tokens), decodes)
        self._waits["step"].add(end_ns, now_ns - record.schedule_start_ns, stratum=work)
        for gap_ns, weight in outcome.gaps_ns.items():
            has_prefill = prefill_ns is not None and prefill_ns > now_ns - gap_ns
            self._waits["itl"].add(end_ns, gap_ns, weight, GapWork(has_prefill, decodes))
        waits: tuple[tuple[LatencyKind, Iterable[tuple[int, int]]], ...] = (
            ("ttft", outcome.ttft_ns), ("tpot", outcome.tpot_ns), ("e2e", outcome.e2e_ns)
        )  # fmt: skip
        for kind, samples in waits:
            for _, wait_ns in samples:
                self._waits[kind].add(end_ns, wait_ns)

    def stretches(self) -> Stretches:
        """The waits so far, by latency, merged into at most `NUM_STRETCHES` slices of time."""
        return {kind: waits.grouped(NUM_STRETCHES) for kind, waits in self._waits.items()}


def in_strata(slices: Iterable[Slice], is_meant: Callable[[Stratum], bool]) -> list[Slice]:
    """Copy slices, with only the strata (kinds of work) for which `is_meant` returns true."""
    return [Counter({key: n for key, n in each.items() if is_meant(key[0])}) for each in slices]


def as_one(slices: Iterable[Slice]) -> list[Slice]:
    """Copy slices, with all strata of a slice merged into one."""
    found: list[Slice] = []
    for each in slices:
        found.append(Counter())
        for (_, at), number in each.items():
            found[-1][0, at] += number
    return found


def bin_of(wait_ns: int) -> int:
    """The histogram bin of a wait. Bins grow with the wait and are about 1 % of it wide."""
    octave = wait_ns.bit_length() - _NUM_EXACT_BITS
    if wait_ns <= 0 or octave <= 0:
        return max(0, wait_ns)
    return octave * _BINS_PER_OCTAVE + (wait_ns >> octave)


def start_of(at: int) -> int:
    """The shortest wait that belongs to a bin, in nanoseconds."""
    octave = max(0, at // _BINS_PER_OCTAVE - 1)
    return (at - octave * _BINS_PER_OCTAVE) << octave


def size_class(number: int) -> int:
    """The size class of a number of tokens or rows: exact up to 8, then at most a fifth wide."""
    if number <= 8:
        return number
    octave = number.bit_length() - 3
    return octave * 4 + (number >> octave) + 1
