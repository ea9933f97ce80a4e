"""`Usual`: how long steps take that compute about as much, and so which ones were held up.

A step costs what it computes. Attention makes a chunk late in a long prompt cost more than an equal
one at its beginning, so what its tokens attend to counts too. Steps are alike whose figures all lie
within the same factor of two: then their times do, for each part of a step's time grows with one
of the figures.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import BatchRow, StepRecord
from stepscope.recordings.state.series.columns import StepColumns
from stepscope.recordings.state.series.latency import percentiles

# What is alike differs by a factor of two at most; the rest is room for noise.
HELD_UP = 3.0  # a step that takes so many times as long as usual is not of its work
STILL_HELD_UP = 2.0  # likewise right after one that was: what slows a machine lasts for some steps
MIN_STEPS = 8  # of as much work, else nobody knows what is usual
_MAX_STEPS = 16_384  # of those in memory, evenly spread: more would say the same
_REACH = 2  # how many doublings larger what is looked at may be, where alike steps are few
_ABOUT = 1.1  # what is usual may differ by so much and is told as the same
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
    """What a step computed."""

    num_tokens: int  # of prefill, decode and padding: a product with weights tells no difference
    num_attended: int  # by prefill: each chunk times its tokens and those before it
    num_blocks: int  # of the KV cache in use, for decodes attend to them; 0 where that is not told


class HeldUpStep(NamedTuple):
    """A step that was held up."""

    took_ns: int
    usual_ns: int

    @property
    def excess_ns(self) -> int:
        return self.took_ns - self.usual_ns


class _Alike:
    """Durations of steps that compute about as much."""

    __slots__ = ("_known_at", "_median_ns", "counts", "longest_ns", "num_steps")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.num_steps = 0
        self.longest_ns = 0
        self._median_ns = 0
        self._known_at = 0

    def copy(self) -> "_Alike":
        other = _Alike()
        other.counts = self.counts.copy()
        other.num_steps, other.longest_ns = self.num_steps, self.longest_ns
        return other

    def add(self, ns: int) -> None:
        rounded = _rounded(ns)
        self.counts[rounded] = self.counts.get(rounded, 0) + 1
        self.num_steps += 1
        self.longest_ns = max(self.longest_ns, ns)

    @property
    def median_ns(self) -> int:
        """Worked out anew once there are a sixteenth more."""
        if not self._known_at or self.num_steps > self._known_at + self._known_at // 16:
            self._median_ns = _median(self.counts.items(), self.num_steps)
            self._known_at = self.num_steps
        return self._median_ns


class Usual:
    """Durations of steps, by their work. One writer.

    Attributes:
        num_steps: that were added.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._alike: dict[_Class, _Alike] = {}
        self._rare: dict[_Class, tuple[int, int | None]] = {}  # (steps known then, usual)

    def add(self, work: StepWork, ns: int) -> None:
        """A step that took so long, from the end of the one before it where they overlap."""
        kind = _class_of(work)
        alike = self._alike.get(kind)
        if alike is None:
            alike = self._alike[kind] = _Alike()
        alike.add(ns)
        self.num_steps += 1

    def copy(self) -> "Usual":
        """What is known now, for others to look at while more is added here."""
        other = Usual()
        other._alike = {kind: alike.copy() for kind, alike in self._alike.items()}
        other.num_steps = self.num_steps
        return other

    def ns(self, work: StepWork) -> int | None:
        """What such a step usually takes; None where too few are known.

        Where few compute as much, it is what those take that compute more, but not far more: one
        that takes long even against them was held up.
        """
        return self._ns(_class_of(work))

    def held(self, work: StepWork, ns: int, *, after_held: bool = False) -> HeldUpStep | None:
        """By what a step that took so long was held up; None where it was not, or nobody knows.

        Args:
            after_held: the step before it was held up.
        """
        return self._held(_class_of(work), ns, STILL_HELD_UP if after_held else HELD_UP)

    @property
    def has_held(self) -> bool:
        """Whether any of the steps was held up."""
        return any(self._held(kind, alike.longest_ns) for kind, alike in self._alike.items())

    def judges_like(self, other: "Usual") -> bool:
        """Whether of the steps that another knows the same work is held up, for about as long."""
        for kind, alike in other._alike.items():
            mine, its = (each._held(kind, alike.longest_ns) for each in (self, other))
            if mine is None and its is None:
                continue
            if mine is None or its is None:
                return False
            if max(mine.usual_ns, its.usual_ns) > _ABOUT * min(mine.usual_ns, its.usual_ns):
                return False
        return True

    def _held(self, kind: _Class, ns: int, times: float = HELD_UP) -> HeldUpStep | None:
        usual_ns = self._ns(kind)
        if not usual_ns or ns < times * usual_ns:
            return None
        return HeldUpStep(ns, usual_ns)

    def _ns(self, kind: _Class) -> int | None:
        alike = self._alike.get(kind)
        if alike is not None and alike.num_steps >= MIN_STEPS:
            return alike.median_ns
        known_at, usual_ns = self._rare.get(kind, (0, None))
        if known_at and self.num_steps <= known_at + known_at // 16:
            return usual_ns
        counts: list[tuple[int, int]] = []
        num_steps = 0
        for other, more in self._alike.items():
            if all(0 <= b - a <= _REACH for a, b in zip(kind, other, strict=True)):
                counts += more.counts.items()
                num_steps += more.num_steps
        usual_ns = _median(counts, num_steps) if num_steps >= MIN_STEPS else None
        self._rare[kind] = self.num_steps, usual_ns
        return usual_ns


def work_of(record: StepRecord, prefills: Sequence[BatchRow]) -> StepWork | None:
    """What a step computed, None where it does not tell.

    Args:
        prefills: its rows that are no decodes.
    """
    if record.batch is None:
        return None
    return work_with(record, sum(row.num_tokens * (row.start + row.num_tokens) for row in prefills))


def work_with(record: StepRecord, num_attended: int) -> StepWork:
    """What a step computed whose prefill attended to so many tokens."""
    return StepWork(
        record.num_prefill_tokens + record.num_decode_tokens + (record.num_padded_tokens or 0),
        num_attended,
        0 if record.kv is None else record.kv.used,
    )


def steps_in(columns: StepColumns, stride: int = 1) -> Iterator[tuple[StepWork, int]]:
    """Work and duration of every `stride`th step but the first: it may have overlapped another.

    What is added to the columns afterwards changes nothing of it.
    """
    told = [columns.column(name)[1::stride] for name in _COLUMNS]
    told.append(columns.tokens_ns[:-1:stride])
    steps = (_told(values) for values in zip(*told, strict=True))
    return (step for step in steps if step is not None)


def _told(values: Sequence[int]) -> tuple[StepWork, int] | None:
    """Work and duration of a step: `values` are `_COLUMNS` of it, and the end of the one before."""
    prefill, attended, decode, padded, used, start_ns, end_ns, before_ns = values
    if attended < 0:
        return None
    work = StepWork(prefill + decode + max(0, padded), attended, max(0, used))
    return work, max(0, end_ns - max(start_ns, before_ns))


class UsualOfFile:
    """What is usual in a whole file, as far as it was read.

    Attributes:
        usual: replaced when more was read, not changed; None: there is no file.
    """

    def __init__(self) -> None:
        self.usual: Usual | None = None


class UsualAtHand:
    """What is usual among the steps in memory, worked out anew once in a while.

    Of a replay it is what is usual in the file, once that is known of as many steps.

    Args:
        lock: guards the columns.

    Attributes:
        usual: as it was worked out last.
    """

    def __init__(self, lock: "threading.RLock", of_file: UsualOfFile) -> None:
        self.usual = Usual()
        self._of_file = of_file
        self._lock = lock
        self._num_steps = 0
        self._last = -1

    def refresh(self, columns: StepColumns) -> bool:
        """Whether so much is new that it was worked out anew."""
        of_file = self._of_file.usual
        if of_file is not None and of_file.num_steps >= min(len(columns), _MAX_STEPS):
            is_new = self.usual is not of_file
            self.usual = of_file
            return is_new
        with self._lock:
            if not columns.steps or not self._is_due(len(columns), columns.steps[-1]):
                return False
            self._num_steps, self._last = len(columns), columns.steps[-1]
            steps = steps_in(columns, -(-self._num_steps // _MAX_STEPS))
        usual = Usual()
        for work, ns in steps:
            usual.add(work, ns)
        self.usual = usual
        return True

    def was_held(self, columns: StepColumns, step: int) -> bool:
        """Whether a step was held up, as who has read all steps in memory up to it knows."""
        with self._lock:
            columns_of_steps = [columns.column(name) for name in _COLUMNS]
            for at in range(columns.index(step) or 0, 0, -1):
                values = [column[at] for column in columns_of_steps]
                told = _told([*values, columns.tokens_ns[at - 1]])
                if told is None or self.usual.held(*told, after_held=True) is None:
                    return False
                if self.usual.held(*told):
                    return True
        return False

    def _is_due(self, num_steps: int, last: int) -> bool:
        interval = min(max(self._num_steps // 2, MIN_STEPS), _MAX_STEPS)
        is_more = num_steps >= self._num_steps + interval
        return is_more or last >= self._last + interval or last < self._last


def _class_of(work: StepWork) -> _Class:
    num_tokens, num_attended, num_blocks = work
    return num_tokens.bit_length(), num_attended.bit_length(), num_blocks.bit_length()


def _rounded(ns: int) -> int:
    """To the middle of those that begin with the same bits."""
    low_bits = ns.bit_length() - _EXACT_BITS
    return ns if low_bits <= 0 else (ns >> low_bits << low_bits) + (1 << low_bits >> 1)


def _median(counts: Iterable[tuple[int, int]], num_steps: int) -> int:
    found = percentiles(sorted(counts), num_steps, (50,))[0]
    return found or 0
