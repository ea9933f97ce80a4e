"""`RunTotals`: sums over all steps of a run, and how they vary over time. Bounded memory."""

from array import array
from collections.abc import Iterable

from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.session.sums import Sums, limited_sums, sums_of
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.series.limits import LIMITS, Limit

NUM_SLICES = 20  # slices of a run, to estimate how much its rates vary
_BLOCK_STEPS = 4096  # rows that are kept until they are added to the sums
_FIRST_WIDTH_NS = 50_000_000
_MAX_BUCKETS = 4096


class CountOverTime:
    """A count in equal intervals of time, whose width doubles as the run grows."""

    def __init__(self) -> None:
        self.width_ns = _FIRST_WIDTH_NS
        self._end_ns = 0
        self._sums = array("q")

    def add(self, time_ns: int, number: int) -> None:
        """Add to the interval that contains `time_ns`. Times must not go back."""
        while time_ns // self.width_ns >= _MAX_BUCKETS:
            self.width_ns *= 2
            if len(self._sums) % 2:
                self._sums.append(0)
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = array("q", (left + right for left, right in pairs))
        bucket = time_ns // self.width_ns
        if bucket >= len(self._sums):
            self._sums.extend([0] * (bucket + 1 - len(self._sums)))
        self._sums[bucket] += number
        self._end_ns = time_ns

    def slices(self) -> list[float]:
        """Rates per second in up to `NUM_SLICES` slices of about equal length, from begin to end.

        Empty if the run is too short.
        """
        num = min(NUM_SLICES, len(self._sums) - 1)
        rates = []
        for place in range(num):
            first, last = (len(self._sums) * each // num for each in (place, place + 1))
            end_ns = min(last * self.width_ns, self._end_ns)
            rates.append(sum(self._sums[first:last]) * 1e9 / (end_ns - first * self.width_ns))
        return rates


class RunTotals:
    """Sums over the steps of a run, and counts over time. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._recent = StepTable()  # not in the sums yet
        self._ends_ns: list[int] = []  # of these steps
        self._sums = Sums()
        self._limited: dict[Limit, Sums] = dict.fromkeys(LIMITS, Sums())
        self._over_time = {
            name: CountOverTime()
            for name in (
                "num_in_tokens",
                "num_output_tokens",
                "num_preempted",
                "num_queried_tokens",
                "num_hit_tokens",
            )
        }
        self.kept, self.late = CountOverTime(), CountOverTime()  # finished requests

    def append(self, applied: AppliedStep, end_ns: int) -> None:
        """Add a step that ended `end_ns` after the run began."""
        self._recent.append(applied)
        self._ends_ns.append(end_ns)
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

    def over_time(self, name: str) -> CountOverTime:
        """A column of the table, as a count over time."""
        self._add_recent()
        return self._over_time[name]

    def _add_recent(self) -> None:
        if not self._ends_ns:
            return
        recent, self._recent = self._recent, StepTable()
        ends_ns, self._ends_ns = self._ends_ns, []
        self._sums += sums_of(recent, 0, len(recent))
        for limit, sums in limited_sums(recent).items():
            self._limited[limit] += sums
        for name, count in self._over_time.items():
            _add_to(count, ends_ns, recent.column(name))


def _add_to(count: CountOverTime, ends_ns: Iterable[int], numbers: Iterable[int]) -> None:
    for end_ns, number in zip(ends_ns, numbers, strict=True):
        count.add(end_ns, max(0, number))
