"""`RunTotals`: sums over all steps of a run, and how they vary over time. Bounded memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.session.sums import Sums, limited_sums, sums_of
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.series.limits import LIMITS, Limit

MAX_SLICES = 80  # beyond that, every two slices are merged
_FIRST_WIDTH_NS = 100_000_000
NUM_SLICES = 20  # slices of a run, to estimate how much its rates vary
_BLOCK_STEPS = 4096  # rows that are kept until they are added to the sums
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

    def grouped(self, num_groups: int) -> list[Counter[_Key]]:
        """Merge the slices into at most `num_groups` longer ones of about equal length."""
        number = len(self._slices)
        num_groups = min(num_groups, number)
        return self._merged(num_groups, lambda place: place * num_groups // number)

    def seconds(self, num_groups: int) -> list[float]:
        """The length of each of these groups."""
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


class RunTotals:
    """Sums over the steps of a run, and counts over time. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._recent = StepTable()  # not in the sums yet
        self._ends_ns: list[int] = []  # of these steps
        self._finished: list[Sequence[bool]] = []  # in these steps: whether each met the levels
        self._sums = Sums()
        self._limited: dict[Limit, Sums] = dict.fromkeys(LIMITS, Sums())
        self._over_time = TimeSlices[str]()

    def append(self, applied: AppliedStep, end_ns: int, finished: Sequence[bool] = ()) -> None:
        """Add a step that ended `end_ns` after the run began.

        Args:
            finished: for each request that finished in it, whether it met the service levels.
        """
        self._recent.append(applied)
        self._ends_ns.append(end_ns)
        self._finished.append(finished)
        if len(self._ends_ns) >= _BLOCK_STEPS:
            self._add_recent()

    @property
    def sums(self) -> Sums:
        """The sums over all steps, and over the time from the first to the last."""
        self._add_recent()
        return self._sums

    @property
    def limited(self) -> dict[Limit, Sums]:
        """For each limit, the sums over the steps that had it."""
        self._add_recent()
        return self._limited

    def over_time(self, *names: str) -> list[list[float]]:
        """For each column of the table, its sums in the slices of the run.

        Also "num_kept", "num_judged" (requests that met the service levels, and all that were
        judged), and "seconds", the length of each slice.
        """
        self._add_recent()
        slices = self._over_time.grouped(NUM_SLICES)
        return [
            self._over_time.seconds(NUM_SLICES)
            if name == "seconds"
            else [each[name] for each in slices]
            for name in names
        ]

    def _add_recent(self) -> None:
        if not self._ends_ns:
            return
        recent, self._recent = self._recent, StepTable()
        ends_ns, self._ends_ns = self._ends_ns, []
        finished, self._finished = self._finished, []
        self._sums += sums_of(recent, 0, len(recent))
        for limit, sums in limited_sums(recent).items():
            self._limited[limit] += sums
        columns = [recent.column(name) for name in _OVER_TIME]
        for end_ns, kept, *numbers in zip(ends_ns, finished, *columns, strict=True):
            counts = self._over_time.at(end_ns)
            counts["num_judged"] += len(kept)
            counts["num_kept"] += sum(kept)
            for name, number in zip(_OVER_TIME, numbers, strict=True):
                counts[name] += max(0, number)
