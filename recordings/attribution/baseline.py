"""`Baseline`: how long a step of a given amount of work takes, and so which steps were slow.

The time of a step depends on its work: tokens, attended tokens and KV blocks. Attended tokens count
because attention makes a late chunk of a long prompt cost more than an early chunk. Two steps are
alike when each of these three numbers lies within the same factor of two.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import BatchRow, StepRecord
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.state.series.distribution import percentiles

# Alike steps differ by a factor of two at most; the rest is room for noise.
SLOW = 3.0  # times the baseline: a longer step is slow
STILL_SLOW = 2.0  # right after a slow step: what slows a machine lasts for some steps
MIN_STEPS = 8  # alike steps needed for a baseline
ENOUGH_STEPS = 16_384  # a file's baseline of as many steps is better than that of any memory
_REACH = 2  # doublings: how much more work steps may have that stand in for alike steps
_ABOUT = 1.1  # baselines that differ by less are treated as equal
_EXACT_BITS = 8  # durations are counted to one part in 128

_COLUMNS = (
    "num_prefill_tokens",
    "num_attended",
    "num_decode_tokens",
    "num_padded_tokens",
    "kv_used",
    "schedule_start_ns",
    "tokens_ns",
)

_Class: TypeAlias = tuple[int, int, int]


class StepWork(NamedTuple):
    """How much a step computed: tokens, attended tokens, KV blocks."""

    num_tokens: int  # of prefill, decode and padding: all cost the same in the weight products
    num_attended: int  # by prefill: for each chunk, its tokens times (they and those before them)
    num_blocks: int  # KV blocks in use, which decodes attend to; 0 where not published


class SlowStep(NamedTuple):
    took_ns: int
    baseline_ns: int
    told: str = ""  # what the baseline rests on, where that is more than the steps before it

    @property
    def excess_ns(self) -> int:
        return self.took_ns - self.baseline_ns


class _Alike:
    __slots__ = ("_known_at", "_median_ns", "counts", "longest_ns", "num_steps")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.num_steps = 0
        self.longest_ns = 0
        self._median_ns = 0
        self._known_at = 0

    def add(self, ns: int) -> None:
        rounded = _rounded(ns)
        self.counts[rounded] = self.counts.get(rounded, 0) + 1
        self.num_steps += 1
        self.longest_ns = max(self.longest_ns, ns)

    @property
    def median_ns(self) -> int:
        """Median duration. It is cached until the number of steps has grown by a sixteenth."""
        if not self._known_at or self.num_steps > self._known_at + self._known_at // 16:
            self._median_ns = _median(self.counts.items(), self.num_steps)
            self._known_at = self.num_steps
        return self._median_ns


class Baseline:
    """Collects the durations of steps, by their work. Only one thread may write."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._ended_ns = 0  # when the last of `add_rows` ended
        self._alike: dict[_Class, _Alike] = {}
        self._rare: dict[_Class, tuple[int, int | None]] = {}  # (steps known then, baseline)

    def add(self, work: StepWork, ns: int) -> None:
        """Add the duration `ns` of a step.

        If steps overlap, it counts from the end of the previous step.
        """
        kind = _class_of(work)
        alike = self._alike.get(kind)
        if alike is None:
            alike = self._alike[kind] = _Alike()
        alike.add(ns)
        self.num_steps += 1

    def add_rows(self, steps: StepTable) -> None:
        if not steps:
            return
        first = [steps.column(name)[0] for name in _COLUMNS]
        for each in (_work_and_duration([*first, self._ended_ns]), *_measured(steps, 1)):
            if each is not None:
                self.add(*each)
        self._ended_ns = steps.tokens_ns[-1]

    def knows(self, work: StepWork) -> bool:
        return self._ns(_class_of(work)) is not None

    def slow_step(
        self, work: StepWork, ns: int, *, after_slow: bool = False, step: int = -1
    ) -> SlowStep | None:
        """Duration and baseline of a step if it was slow; None if not, or if no baseline is known.

        `after_slow`: whether the previous step was slow.
        """
        return self._slow_step(_class_of(work), ns, STILL_SLOW if after_slow else SLOW)

    def judges_like(self, other: "Baseline") -> bool:
        """Whether this baseline and `other` call the same steps slow, by about as much.

        Judged are the steps that were added to `other`.
        """
        for kind, alike in other._alike.items():
            mine, its = (each._slow_step(kind, alike.longest_ns) for each in (self, other))
            if mine is None and its is None:
                continue
            if mine is None or its is None:
                return False
            if max(mine.baseline_ns, its.baseline_ns) > _ABOUT * min(
                mine.baseline_ns, its.baseline_ns
            ):
                return False
        return True

    def _slow_step(self, kind: _Class, ns: int, times: float = SLOW) -> SlowStep | None:
        baseline_ns = self._ns(kind)
        if not baseline_ns or ns < times * baseline_ns:
            return None
        return SlowStep(ns, baseline_ns, f"by {self.num_steps:,} steps of the file")

    def _ns(self, kind: _Class) -> int | None:
        """The usual duration of a step with this work; None if too few such steps are known.

        If few steps with about this work are known, steps with somewhat more work count too: a step
        that is slow even compared to those is certainly slow.
        """
        alike = self._alike.get(kind)
        if alike is not None and alike.num_steps >= MIN_STEPS:
            return alike.median_ns
        known_at, baseline_ns = self._rare.get(kind, (0, None))
        if known_at and self.num_steps <= known_at + known_at // 16:
            return baseline_ns
        counts: list[tuple[int, int]] = []
        num_steps = 0
        for other, more in self._alike.items():
            if all(0 <= b - a <= _REACH for a, b in zip(kind, other, strict=True)):
                counts += more.counts.items()
                num_steps += more.num_steps
        baseline_ns = _median(counts, num_steps) if num_steps >= MIN_STEPS else None
        self._rare[kind] = self.num_steps, baseline_ns
        return baseline_ns


def work_of(record: StepRecord, prefills: Sequence[BatchRow]) -> StepWork | None:
    """How much a step computed; None if its record has no batch."""
    if record.batch is None:
        return None
    return work_with(record, sum(row.num_tokens * (row.start + row.num_tokens) for row in prefills))


def work_with(record: StepRecord, num_attended: int) -> StepWork:
    """How much a step computed, given the number of tokens that its prefill attended to."""
    return StepWork(
        record.num_prefill_tokens + record.num_decode_tokens + (record.num_padded_tokens or 0),
        num_attended,
        0 if record.kv is None else record.kv.used,
    )


def _measured(columns: StepTable, begin: int) -> list[tuple[StepWork, int] | None]:
    """Work and duration of each step from the index `begin` on; None where they are not known."""
    taken = [columns.column(name)[max(begin, 1) :] for name in _COLUMNS]
    taken.append(columns.tokens_ns[max(begin, 1) - 1 : -1])
    found = [_work_and_duration(values) for values in zip(*taken, strict=True)]
    return found if begin or not columns.steps else [None, *found]


def _work_and_duration(values: Sequence[int]) -> tuple[StepWork, int] | None:
    """Work and duration of a step; None if the work is unknown.

    `values`: its `_COLUMNS`, then the end of the previous step.
    """
    prefill, attended, decode, padded, used, start_ns, end_ns, before_ns = values
    if attended < 0:
        return None
    work = StepWork(prefill + decode + max(0, padded), attended, max(0, used))
    return work, max(0, end_ns - max(start_ns, before_ns))


class FileBaseline:
    """The baseline from the steps of a file.

    `baseline`: set once, when enough of the file was read, and never changed: what was explained
    stays. None without a file.
    """

    def __init__(self) -> None:
        self.baseline: Baseline | None = None


class MemoryBaseline:
    """Tells which of the steps in memory were slow: each once, by the steps known before it.

    So an explanation stays as it is when later steps come or old ones are forgotten. A replay uses
    the baseline of the whole file instead, as soon as that covers as many steps.

    `baseline`: the latest one.
    """

    def __init__(self, lock: "threading.RLock", of_file: FileBaseline, columns: StepTable) -> None:
        self.baseline = Baseline()
        self._of_file = of_file
        self._lock = lock
        self._columns = columns
        self._slow: dict[int, SlowStep] = {}
        self._judged: tuple[int, int] | None = None  # the first and the last step judged
        # Steps without a baseline so far. They are judged once, when there is one.
        self._open: dict[int, tuple[StepWork, int]] = {}

    @property
    def _is_of_file(self) -> bool:
        return self.baseline is self._of_file.baseline

    def refresh(self) -> bool:
        """Judge the new steps. Returns whether an earlier step is judged now, or all by a file."""
        of_file = self._of_file.baseline
        if of_file is not None and of_file.num_steps >= min(len(self._columns), ENOUGH_STEPS):
            is_new = self.baseline is not of_file
            self.baseline = of_file
            return is_new
        with self._lock:
            steps = self._columns.steps
            if not steps:
                return False
            first, last = self._judged or (steps[0], steps[0] - 1)
            if self._is_of_file or steps[0] < first:  # earlier steps came: they are judged, too
                self.baseline, begin = Baseline(), 0
            else:
                begin = bisect_right(steps, last)
            self._judged = min(first, steps[0]), max(last, steps[-1])
            numbers = steps[begin:]
            measured = _measured(self._columns, begin)
        was_slow = begin > 0 and steps[begin - 1] in self._slow
        is_anew = False
        for step, each in zip(numbers, measured, strict=True):
            if each is not None:
                if not first <= step <= last:
                    is_anew |= self._judge(step, each, was_slow)
                self.baseline.add(*each)
            was_slow = step in self._slow
        return is_anew

    def _judge(self, step: int, measured: tuple[StepWork, int], was_slow: bool) -> bool:
        """Judge a step; now and then also earlier ones. Returns whether one of those was slow."""
        if (slow := self.baseline.slow_step(*measured, after_slow=was_slow)) is not None:
            self._slow[step] = slow._replace(told="")
        elif not self.baseline.knows(measured[0]):
            self._open[step] = measured
        if self.baseline.num_steps & (self.baseline.num_steps - 1):
            return False
        known = {at: each for at, each in self._open.items() if self.baseline.knows(each[0])}
        for at, each in known.items():
            del self._open[at]
            if (slow := self.baseline.slow_step(*each)) is not None:
                self._slow[at] = slow._replace(told=f"known since step {step:,}")
        return any(at in self._slow for at in known)

    def slow_step(
        self, work: StepWork, ns: int, *, after_slow: bool = False, step: int = -1
    ) -> SlowStep | None:
        """Duration and baseline of a step if it was slow; see `Baseline.slow_step`."""
        if self._is_of_file:
            return self.baseline.slow_step(work, ns, after_slow=after_slow)
        if self._judged is None or step > self._judged[1]:  # it came after `refresh`
            self.refresh()
        return self._slow.get(step)

    def was_slow(self, step: int) -> bool:
        """Whether a step was slow, as if all steps in memory up to it had been judged in order."""
        if not self._is_of_file:
            return step in self._slow
        with self._lock:
            measured = _measured(self._columns, 0)[: (self._columns.index(step) or 0) + 1]
        for each in reversed(measured):
            if each is None or self.baseline.slow_step(*each, after_slow=True) is None:
                return False
            if self.baseline.slow_step(*each):
                return True
        return False


def _class_of(work: StepWork) -> _Class:
    num_tokens, num_attended, num_blocks = work
    return num_tokens.bit_length(), num_attended.bit_length(), num_blocks.bit_length()


def _rounded(ns: int) -> int:
    """Round to the middle of the values that share the leading bits."""
    low_bits = ns.bit_length() - _EXACT_BITS
    return ns if low_bits <= 0 else (ns >> low_bits << low_bits) + (1 << low_bits >> 1)


def _median(counts: Iterable[tuple[int, int]], num_steps: int) -> int:
    found = percentiles(sorted(counts), num_steps, (50,))[0]
    return found or 0
