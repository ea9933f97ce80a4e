"""`TimedRows`: numbers by time; `Samples`: latencies, with exact percentiles of any window.

`FinishedRequests`: how many requests met their service levels, for any window and any levels: the
first token came within the TTFT level and each later one within the ITL level. Only requests seen
from arrival to end are judged. An operator's pauses do not count.
"""

import copy
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from stepscope.recordings.state.lazy_numpy import np
from stepscope.recordings.state.outcome import FinishedRequest, Outcome
from stepscope.recordings.state.session import SessionState


def bounded(value: int) -> int:
    """Clamp to the range of a 64-bit array entry."""
    return min(max(value, -(2**63)), 2**63 - 1)


class Ranked:
    """Some samples in order of their values. At least one."""

    def __init__(self, values: "array[int]", weights: "array[int]") -> None:
        order = np.argsort(unsorted := np.frombuffer(values, dtype=np.int64), kind="stable")
        self._values = unsorted[order]
        self._upto = np.cumsum(np.frombuffer(weights, dtype=np.int64)[order])
        self.count = int(self._upto[-1])
        self.smallest, self.largest = int(self._values[0]), int(self._values[-1])

    @classmethod
    def of(cls, counts: Iterable[tuple[int, int]]) -> Self:
        """From pairs of a value and its weight."""
        values, weights = zip(*counts, strict=True)
        return cls(array("q", map(bounded, values)), array("q", weights))

    def num_up_to(self, value: float) -> int:
        """Weight of the samples that do not exceed a value."""
        place = int(self._values.searchsorted(bounded(math.floor(value)), side="right"))
        return int(self._upto[place - 1]) if place else 0

    def percentiles(self, ranks: Sequence[float]) -> list[int]:
        """Nearest-rank percentiles of `ranks` in (0, 100]: values that somebody really had."""
        places = self._upto.searchsorted([-(-rank * self.count // 100) for rank in ranks])
        return [int(value) for value in self._values[places]]


class TimedRows:
    """Rows of whole numbers in order of time.

    One thread writes; readers hold its lock or use a `cut`.
    """

    def __init__(self, num_columns: int) -> None:
        self._columns = [array("q") for _ in range(1 + num_columns)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(*self._columns, strict=True)

    def append(self, time_ns: int, *values: int) -> None:
        """Add a row. To keep the order, its time is at least that of the last one."""
        times = self._columns[0]
        row = max(time_ns, times[-1]) if times else time_ns, *values
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def cut(self, start_ns: int, end_ns: int) -> Self:
        """A copy of the rows with times in (start_ns, end_ns]."""
        first, last = (bisect_right(self._columns[0], each) for each in (start_ns, end_ns))
        other = copy.copy(self)
        other._columns = [column[first:last] for column in self._columns]
        return other

    def forget_before(self, time_ns: int) -> None:
        num_old = bisect_left(self._columns[0], time_ns)
        for column in self._columns:
            del column[:num_old]

    def forget_after(self, time_ns: int) -> None:
        num_kept = self.num_until(time_ns)
        for column in self._columns:
            del column[num_kept:]

    def num_until(self, time_ns: int) -> int:
        return bisect_right(self._columns[0], time_ns)


class Samples(TimedRows):
    def __init__(self) -> None:
        super().__init__(2)

    def add(self, time_ns: int, value_ns: int, weight: int = 1) -> None:
        """Append a sample, like `append` but in half the time: every step has several."""
        times, values, weights = self._columns
        times.append(max(time_ns, times[-1]) if times else time_ns)
        values.append(bounded(value_ns))
        weights.append(weight)

    def num_above(self, start_ns: int, end_ns: int, value: float) -> int:
        """Weight of the samples in (start_ns, end_ns] that exceed a value."""
        part = self.cut(start_ns, end_ns).ranked()
        return 0 if part is None else part.count - part.num_up_to(value)

    def ranked(self, first: int = 0, last: int | None = None) -> Ranked | None:
        """The samples in the places [first, last), ranked by value; None if there are none."""
        _, values, weights = (column[first:last] for column in self._columns)
        return Ranked(values, weights) if values else None

    def worst(self, start_ns: int, end_ns: int, slices: int) -> list[int | None]:
        """The largest sample of each slice of (start_ns, end_ns], oldest first.

        Slices end at multiples of their width, so that they do not shift as time goes on.
        """
        times, values, _ = self._columns
        worst: list[int | None] = []
        width_ns = max(1, (end_ns - start_ns) // slices)
        newest_ns = -(-end_ns // width_ns) * width_ns
        first = bisect_right(times, newest_ns - width_ns * slices)
        for number in range(slices - 1, -1, -1):
            last = bisect_right(times, min(newest_ns - width_ns * number, end_ns), first)
            worst.append(max(values[first:last], default=None))
            first = last
        return worst


_SPARE = 1024  # entries beyond the live requests before stale ones are removed


class KeptLevels(NamedTuple):
    """How many finished requests of a window were judged, and how many met the service levels."""

    num_judged: int
    num_kept: int

    @property
    def share(self) -> float | None:
        return self.num_kept / self.num_judged if self.num_judged else None

    @property
    def is_low(self) -> bool:
        """Whether most of at least a few requests broke a level."""
        return self.num_judged >= 5 and self.num_kept * 2 < self.num_judged


class FinishedRequests(TimedRows):
    """One row per finished request: its TTFT, longest gap, and the floor of gaps."""

    def __init__(self) -> None:
        super().__init__(len(FinishedRequest._fields))

    def kept(self, ttft_ms: float, itl_ms: float) -> KeptLevels:
        """Count the requests that were judged, and those that met these service levels.

        Gaps are recorded only above the ITL level that was set when the request was served. So if
        `itl_ms` is lower, requests without longer gaps are not judged.
        """
        ttft_ns, itl_ns = ttft_ms * 1e6, itl_ms * 1e6
        ttft, worst, floor = (np.frombuffer(each, dtype=np.int64) for each in self._columns[1:])
        is_broken = (ttft > ttft_ns) | (worst > itl_ns)
        num_kept = int((~is_broken & (floor <= itl_ns)).sum())
        return KeptLevels(int(is_broken.sum()) + num_kept, num_kept)


class RequestWatch:
    """Records the TTFT and the longest gap between tokens of each request until it ends.

    Whether a request met its service levels is decided later, by `FinishedRequests`.
    """

    def __init__(self, itl_ms: float, state: SessionState) -> None:
        self._floor_ns = round(itl_ms * 1e6)  # gaps up to it are not recorded
        self._ttft_ns: dict[int, int] = {}  # of requests that were observed from their arrival
        self._worst_ns: dict[int, int] = {}  # their longest gap above the floor
        self.begin(state)

    def begin(self, state: SessionState) -> None:
        """Restart from a state, without its requests: their earlier gaps are unknown."""
        state.table.late_ns = self._floor_ns
        self._ttft_ns.clear()
        self._worst_ns.clear()

    def open(self) -> list[tuple[int, int, int]]:
        """The requests that it follows and that have a token: id, TTFT, longest gap so far."""
        return [(each, ns, self._worst_ns.get(each, 0)) for each, ns in self._ttft_ns.items()]

    def go_on_with(self, followed: Iterable[tuple[int, int, int]]) -> None:
        """Follow these requests further, see `open`."""
        for request_id, ttft_ns, worst_ns in followed:
            self._ttft_ns[request_id], self._worst_ns[request_id] = ttft_ns, worst_ns

    def set_floor(self, itl_ms: float, state: SessionState) -> None:
        """Change the length above which gaps are recorded.

        If it becomes lower, requests in progress are left out: their shorter gaps are unknown.
        """
        floor_ns = round(itl_ms * 1e6)
        is_lower, self._floor_ns = floor_ns < self._floor_ns, floor_ns
        if is_lower:
            self.begin(state)
        state.table.late_ns = floor_ns

    def take(self, outcome: Outcome, state: SessionState, now_ns: int) -> None:
        """Add to `outcome` the requests that finished in its step, and longest gaps.

        The operator's pauses must be left out of it. The tokens of the step were known at `now_ns`.
        """
        for request_id, ns in outcome.ttft_ns:
            self._ttft_ns[request_id] = ns
        worst_ns, longer = self._worst_ns, []
        last_ns = paused_ns = 0
        for request_id, gap_ns in outcome.late_gaps:
            if gap_ns != last_ns:  # those who decode side by side have equal gaps
                last_ns, paused_ns = gap_ns, state.pauses.within(now_ns - gap_ns, now_ns)
            ns = gap_ns - paused_ns
            if ns > worst_ns.get(request_id, self._floor_ns):
                worst_ns[request_id] = ns
                longer.append((request_id, ns))
        outcome.longer = longer
        for request_id, _ in outcome.e2e_ns:
            ttft_ns = self._ttft_ns.pop(request_id, None)
            longest_ns = worst_ns.pop(request_id, 0)
            if ttft_ns is not None:
                finished = FinishedRequest(ttft_ns, longest_ns, self._floor_ns)
                outcome.finished = [*outcome.finished, finished]
        if len(self._ttft_ns) + len(self._worst_ns) > 2 * len(state.requests) + _SPARE:
            for known in (self._ttft_ns, self._worst_ns):
                for request_id in [each for each in known if each not in state.requests]:
                    del known[request_id]
