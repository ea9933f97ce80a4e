"""`RunTotals`: sums over all steps of a run; `RunSlices`: how it varies. Bounded memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from stepscope.recordings.session.index import KINDS, IndexRows
from stepscope.recordings.session.sums import Sums, limited_sums, sums_of
from stepscope.recordings.session.waits import (
    BESIDE_PREFILL,
    DECODE_ONLY,
    NUM_BINS,
    STEP_TIMES,
    WaitSums,
    bins_of,
)
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.latency_samples import KeptLevels
from stepscope.recordings.state.lazy_numpy import Bools, Ints, np
from stepscope.recordings.state.limits import LIMITS, Limit

MAX_SLICES = 80  # beyond that, every two slices are merged
_FIRST_WIDTH_NS = 100_000_000
NUM_SLICES = 20  # slices of a run, to estimate how much its rates vary
_NEVER = -(1 << 62)
_OVER_TIME = (
    "num_in_tokens", "num_output_tokens", "num_preempted", "num_queried_tokens", "num_hit_tokens",
    "num_prefill_tokens", "num_recomputed_tokens",
)  # fmt: skip

_Key = TypeVar("_Key")


class TimeSlices(Generic[_Key]):
    """Counts in equal slices of time, whose width doubles as the run grows.

    Only one thread may write.
    """

    def __init__(self) -> None:
        self.width_ns = _FIRST_WIDTH_NS
        self._slices: list[Counter[_Key]] = []
        self._end_ns = 0

    def at(self, time_ns: int) -> Counter[_Key]:
        """The counts of the slice at a time since the run began. Times must not go back."""
        while (place := time_ns // self.width_ns) >= MAX_SLICES:
            self.width_ns *= 2
            self._slices = self._merged(len(self._slices[::2]), lambda place: place // 2)
        while place >= len(self._slices):
            self._slices.append(Counter())
        self._end_ns = time_ns
        return self._slices[place]

    def parts(self, times_ns: Ints) -> Iterator[tuple[slice, Counter[_Key]]]:
        """Yield which of these times, in order, lie in a slice, and the counts of that slice."""
        self.at(int(times_ns[-1]))
        places, firsts = np.unique(times_ns // self.width_ns, return_index=True)
        ends = [*firsts[1:].tolist(), len(times_ns)]
        for place, first, end in zip(places.tolist(), firsts.tolist(), ends, strict=True):
            yield slice(first, end), self._slices[place]

    def grouped(self, num_groups: int) -> list[Counter[_Key]]:
        """Merge the slices into at most `num_groups` longer ones of about equal length."""
        number = len(self._slices)
        num_groups = min(num_groups, number)
        return self._merged(num_groups, lambda place: place * num_groups // number)

    def seconds(self, num_groups: int) -> list[float]:
        number = len(self._slices)
        num_groups = min(num_groups, number)
        ends = [-(-each * number // num_groups) for each in range(1, num_groups + 1)]
        ends_ns = [0, *(min(end * self.width_ns, self._end_ns) for end in ends)]
        return [(end - start) / 1e9 for start, end in pairwise(ends_ns)]

    def _merged(self, number: int, group_of: Callable[[int], int]) -> list[Counter[_Key]]:
        groups: list[Counter[_Key]] = [Counter() for _ in range(number)]
        for place, each in enumerate(self._slices):
            groups[group_of(place)].update(each)
        return groups


class StepTimes(NamedTuple):
    """When steps began and ended, in nanoseconds since the beginning of their run."""

    starts_ns: Ints
    ends_ns: Ints  # never before the start, or before the end of an earlier step


class RunTotals:
    """What a run adds up to. Only one thread may use it at a time.

    `slo`: the service levels that requests are judged by.

    Attributes:
        start_ns: engine time at which the first step began; None before it.
        limited: for each limit, the sums over the steps that had it.
    """

    def __init__(self, slo: SLO) -> None:
        self.start_ns: int | None = None
        self.sums = Sums()  # over all steps, and over the time from the first to the last
        self.limited: dict[Limit, Sums] = dict.fromkeys(LIMITS, Sums())
        self.waits = WaitSums({"ttft": slo.ttft_ms * 1e6, "itl": slo.itl_ms * 1e6})  # all latencies
        self.kept = KeptLevels(0, 0)  # of the requests that finished, how many kept their levels
        self._slo = slo

    def add(self, rows: IndexRows, first: int = 0, *, is_one_step: bool) -> StepTimes:
        """Add the steps of an index from the place `first` on, of which there must be one."""
        steps = rows.steps()
        starts_ns, ends_ns = (rows.column("steps", name)[first:] for name in STEP_TIMES)
        if self.start_ns is None:
            self.start_ns = int(starts_ns[0])
        before_ns = self.sums.span_ns
        latest_ns = np.maximum(np.maximum(starts_ns, ends_ns) - self.start_ns, before_ns)
        since_ns = np.maximum.accumulate(latest_ns)
        self.sums += sums_of(steps, first, len(steps))
        self.sums = replace(self.sums, span_ns=int(since_ns[-1]))
        for limit, sums in limited_sums(steps, first).items():
            self.limited[limit] += sums
        self.waits.add(rows, first, is_one_step=is_one_step)
        places, is_kept = judged(rows, first, self._slo)
        num_judged, num_kept = self.kept
        self.kept = KeptLevels(num_judged + len(places), num_kept + int(is_kept.sum()))
        starts = np.maximum(starts_ns - self.start_ns, np.append(before_ns, since_ns[:-1]))
        return StepTimes(starts, since_ns)


def judged(rows: IndexRows, first: int, slo: SLO) -> tuple[Ints, Bools]:
    """Of each request that finished from the place `first` on, its place, and if it kept `slo`."""
    ttft_ns, worst_ns = rows.column("finished", "ttft_ns"), rows.column("finished", "worst_itl_ns")
    is_kept = (ttft_ns <= slo.ttft_ms * 1e6) & (worst_ns <= slo.itl_ms * 1e6)
    places = rows.column("finished", "place")
    chosen = places >= first
    return places[chosen], is_kept[chosen]


class RunSlices:
    """How a run varies over time. Only one thread may use it at a time.

    `waits`: for each slice of the run, kind and bin of a wait -> number of waits.
    """

    def __init__(self, slo: SLO) -> None:
        self.waits = TimeSlices[tuple[str, int]]()
        self._counts = TimeSlices[str]()
        self._prefill_ns = _NEVER  # when the last step with prefill ended
        self._slo = slo

    def over_time(self, *names: str) -> list[list[float]]:
        """For each column of the table, its sums in the slices of the run.

        Also "num_kept", "num_judged" (requests that met the service levels, and all that were
        judged), and "seconds", the length of each slice.
        """
        slices = self._counts.grouped(NUM_SLICES)
        return [
            self._counts.seconds(NUM_SLICES)
            if name == "seconds"
            else [each[name] for each in slices]
            for name in names
        ]

    def add(self, rows: IndexRows, ends_ns: Ints, *, is_one_step: bool) -> None:
        """Add steps.

        `ends_ns`: when each ended, since the beginning of the run, in order.
        """
        columns = {name: rows.column("steps", name) for name in _OVER_TIME}
        places, is_kept = judged(rows, 0, self._slo)
        for name, which in (("num_judged", places), ("num_kept", places[is_kept])):
            columns[name] = np.bincount(which, minlength=len(ends_ns))
        for part, counts in self._counts.parts(ends_ns):
            for name, values in columns.items():
                counts[name] += int(np.maximum(values[part], 0).sum())
        places, keys, numbers = self._waits(rows, is_one_step=is_one_step)
        names = (*KINDS, DECODE_ONLY, BESIDE_PREFILL)
        for part, waits in self.waits.parts(ends_ns):
            chosen = slice(*np.searchsorted(places, (part.start, part.stop)).tolist())
            found, at = np.unique(keys[chosen], return_inverse=True)
            totals = np.bincount(at, weights=numbers[chosen])
            for key, number in zip(found.tolist(), totals.tolist(), strict=True):
                kind, wait_bin = divmod(key, NUM_BINS)
                waits[names[kind], wait_bin] += int(number)

    def _waits(self, rows: IndexRows, *, is_one_step: bool) -> list[Ints]:
        """Place, kind times `NUM_BINS` plus bin, and number of all waits, in order of places.

        Gaps between tokens are there twice, also as one of the last two kinds.
        """
        places, kinds, ns, numbers = (
            rows.column("waits", name) for name in ("place", "kind", "ns", "number")
        )
        if is_one_step:  # a record of an interval tells of no single step
            starts_ns, ends_ns = (rows.column("steps", name) for name in STEP_TIMES)
            has_prefill = rows.column("steps", "num_prefill_tokens") > 0
            prefill_ns = np.maximum.accumulate(np.where(has_prefill, ends_ns, self._prefill_ns))
            self._prefill_ns = int(prefill_ns[-1])
            is_itl = kinds == KINDS.index("itl")
            at, itl_ns = places[is_itl], ns[is_itl]
            is_beside = prefill_ns[at] > ends_ns[at] - itl_ns
            parts = np.where(is_beside, len(KINDS) + 1, len(KINDS))
            places = np.concatenate((places, np.arange(len(starts_ns)), at))
            kinds = np.concatenate((kinds, np.full(len(starts_ns), KINDS.index("step")), parts))
            ns = np.concatenate((ns, ends_ns - starts_ns, itl_ns))
            numbers = np.concatenate((numbers, np.ones_like(starts_ns), numbers[is_itl]))
        order = np.argsort(places, kind="stable")
        return [each[order] for each in (places, kinds * NUM_BINS + bins_of(ns), numbers)]
