"""`Baseline`: how long a step of a given amount of work takes, and so which steps were slow.

The time of a step depends on its work: tokens, attended tokens and KV blocks. Attended tokens count
because attention makes a late chunk of a long prompt cost more than an early chunk. Two steps are
alike when each of these three numbers lies within the same factor of two.
"""

import math
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import BatchRow, StepRecord
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.latency_samples import Ranked

# Alike steps differ by a factor of two at most; the rest is room for noise.
SLOW = 3.0  # times the baseline: a longer step is slow
STILL_SLOW = 2.0  # right after a slow step: what slows a machine lasts for some steps
MIN_STEPS = 8  # alike steps needed for a baseline
ENOUGH_STEPS = 16_384  # a file's baseline of as many steps is better than that of any memory
_REACH = 2  # doublings: how much more work steps may have that stand in for alike steps
_EXACT_BITS = 8  # durations are counted to one part in 128

_COLUMNS = (
    *("num_prefill_tokens", "num_attended", "num_decode_tokens", "num_padded_tokens"),
    *("kv_used", "schedule_start_ns", "tokens_ns"),
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


@dataclass(slots=True, eq=False)
class _Alike:
    took: Distribution = field(
        default_factory=lambda: Distribution(max_values=0, num_bits=_EXACT_BITS)
    )
    _median_ns: int = 0
    _known_at: int = 0

    @property
    def median_ns(self) -> int:
        """Median duration. It is cached until the number of steps has grown by a sixteenth."""
        if not self._known_at or self.took.count > self._known_at + self._known_at // 16:
            (self._median_ns,) = self.took.percentiles(50)
            self._known_at = self.took.count
        return self._median_ns


class Baseline:
    """Collects the durations of steps, by their work. Only one thread may write."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._ended_ns = 0  # when the last of `add_rows` ended
        self._alike: defaultdict[_Class, _Alike] = defaultdict(_Alike)
        self._rare: dict[_Class, tuple[int, int | None]] = {}  # (steps known then, baseline)

    def add(self, work: StepWork, ns: int) -> None:
        """Add the duration `ns` of a step; if steps overlap, since the end of the one before."""
        self._alike[_class_of(work)].took.add(ns)
        self.num_steps += 1

    def add_rows(self, steps: StepTable) -> None:
        for each in _measured(steps, 0, ended_ns=self._ended_ns):
            if each is not None:
                self.add(*each)
        self._ended_ns = max(steps.tokens_ns[-1:], default=self._ended_ns)

    def slow_step(
        self, work: StepWork, ns: int, *, after_slow: bool = False, step: int = -1
    ) -> SlowStep | None:
        """Duration and baseline of a step if it was slow; None if not, or without a baseline."""
        baseline_ns = self._ns(_class_of(work))
        if not baseline_ns or ns < (STILL_SLOW if after_slow else SLOW) * baseline_ns:
            return None
        return SlowStep(ns, baseline_ns)

    def _ns(self, kind: _Class) -> int | None:
        """The usual duration of a step with this work; None if too few such steps are known.

        Of rare work, steps with somewhat more count too: what is slow beside those is certainly
        slow.
        """
        alike = self._alike.get(kind)
        if alike is not None and alike.took.count >= MIN_STEPS:
            return alike.median_ns
        known_at, baseline_ns = self._rare.get(kind, (0, None))
        if known_at and self.num_steps <= known_at + known_at // 16:
            return baseline_ns
        counts: list[tuple[int, int]] = []
        for other, more in self._alike.items():
            if all(0 <= b - a <= _REACH for a, b in zip(kind, other, strict=True)):
                counts += more.took.counts.items()
        baseline_ns = None
        if sum(number for _, number in counts) >= MIN_STEPS:
            (baseline_ns,) = Ranked.of(counts).percentiles((50,))
        self._rare[kind] = self.num_steps, baseline_ns
        return baseline_ns


def work_of(record: StepRecord, prefills: Sequence[BatchRow]) -> StepWork | None:
    """How much a step computed; None if its record has no batch."""
    if record.batch is None:
        return None
    return StepWork(
        record.num_prefill_tokens + record.num_decode_tokens + (record.num_padded_tokens or 0),
        sum(row.num_tokens * (row.start + row.num_tokens) for row in prefills),
        0 if record.kv is None else record.kv.used,
    )


def _measured(
    steps: StepTable, begin: int, end: int | None = None, ended_ns: int | None = None
) -> list[tuple[StepWork, int] | None]:
    """Work and duration of the steps at these places; None where they are not known.

    `ended_ns`: when the step before the first of the table ended; None if unknown.
    """
    end = len(steps) if end is None else end
    columns = [steps.column(name)[begin:end] for name in _COLUMNS]
    before = steps.tokens_ns[begin - 1 : end - 1] if begin else [ended_ns, *steps.tokens_ns]
    found: list[tuple[StepWork, int] | None] = []
    for *work, start_ns, end_ns, before_ns in zip(*columns, before, strict=False):
        prefill, attended, decode, padded, used = work
        if attended < 0 or before_ns is None:
            found.append(None)
            continue
        done = StepWork(prefill + decode + max(0, padded), attended, max(0, used))
        found.append((done, max(0, end_ns - max(start_ns, before_ns))))
    return found


class MemoryBaseline:
    """Tells which steps in memory were slow, by all of them: each once, so that they stay so.

    Attributes:
        of_file: the baseline of a replayed file, when enough of it was read.
        baseline: that of the steps in memory; or `of_file`, once that covers as many.
    """

    def __init__(
        self, lock: "threading.RLock", columns: StepTable, of_file: Baseline | None
    ) -> None:
        self.of_file = of_file
        self.baseline = Baseline()
        self._lock, self._columns = lock, columns
        self._slow: dict[int, SlowStep] = {}
        self._first = self._last = -1  # the steps that were added
        self._judge_at: float = MIN_STEPS  # so many steps

    def refresh(self) -> bool:
        """Add the new steps. Returns whether all were judged anew, as twice as many are known."""
        of_file = self.of_file
        if of_file is not None and of_file.num_steps >= min(len(self._columns), ENOUGH_STEPS):
            is_anew, self.baseline = self.baseline is not of_file, of_file
            return is_anew
        with self._lock:
            steps = self._columns.steps
            if not steps:
                return False
            if self.baseline is of_file or steps[0] < self._first or self._last < 0:
                self.baseline, self._judge_at = Baseline(), 0
                self._first, self._last = steps[0], steps[0] - 1
            begin = bisect_right(steps, self._last)
            self._last = max(self._last, steps[-1])
            measured = _measured(self._columns, begin)
            for each in measured:
                if each is not None:
                    self.baseline.add(*each)
            if is_anew := self.baseline.num_steps >= self._judge_at:
                known = max(MIN_STEPS // 2, self.baseline.num_steps)
                self._judge_at = 2 * known if known < ENOUGH_STEPS else math.inf
                measured = _measured(self._columns, 0) if begin else measured
                begin, self._slow = 0, {}
            numbers, was_slow = steps[begin:], begin > 0 and steps[begin - 1] in self._slow
        for step, each in zip(numbers, measured, strict=True):
            slow = each and self.baseline.slow_step(*each, after_slow=was_slow)
            if slow:
                self._slow[step] = slow
            was_slow = bool(slow)
        return is_anew

    def slow_step(
        self, work: StepWork, ns: int, *, after_slow: bool = False, step: int = -1
    ) -> SlowStep | None:
        """Duration and baseline of a step if it was slow; see `Baseline.slow_step`."""
        if self.baseline is self.of_file:
            return self.baseline.slow_step(work, ns, after_slow=after_slow)
        if step > self._last:  # it came after `refresh`
            self.refresh()
        return self._slow.get(step)

    def was_slow(self, step: int) -> bool:
        """Whether a step was slow, as if all steps in memory up to it had been judged in order."""
        if self.baseline is not self.of_file:
            return step in self._slow
        with self._lock:
            for place in range(self._columns.index(step) or 0, 0, -1):
                each = _measured(self._columns, place, place + 1)[0]
                if each is None or self.baseline.slow_step(*each, after_slow=True) is None:
                    return False
                if self.baseline.slow_step(*each):
                    return True
        return False


def _class_of(work: StepWork) -> _Class:
    num_tokens, num_attended, num_blocks = work
    return num_tokens.bit_length(), num_attended.bit_length(), num_blocks.bit_length()
