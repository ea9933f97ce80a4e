"""Puts two runs on one axis: time, steps, or time since the arrival of one request."""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.side.points import StepPoint, StepPoints
from stepscope.recordings.compare.side.requests import Pair, RequestRun
from stepscope.recordings.compare.side.side import Side

Align: TypeAlias = Literal["time", "step", "request"]
ALIGNMENTS: tuple[Align, ...] = ("time", "step", "request")


class Place(NamedTuple):
    """The chart points of one run, and the place of offset 0 on the common axis.

    `zero`: nanoseconds or steps from the start of this run to offset 0.
    """

    points: StepPoints
    zero: int


class Axis(NamedTuple):
    """Two runs on one chart axis. Offsets are nanoseconds, or steps if `align` is "step".

    `start`, `end`: range of the offsets at which either run has steps.
    """

    align: Align
    a: Place
    b: Place
    start: int
    end: int

    @property
    def unit(self) -> int:
        return 1 if self.align == "step" else 1_000_000

    def column(self, place: Place, start: int, end: int) -> StepPoint | None:
        """Maxima over the steps of a run with offsets in [start, end); None without any."""
        points = place.points
        start, end = start + place.zero, end + place.zero
        if self.align == "step":
            if points.first_step is None or end <= 0:
                return None
            first = points.index_of_step(points.first_step + start)
            last = points.index_of_step(points.first_step + end - 1)
            is_after = points.last_step is None or points.first_step + start > points.last_step
            return None if is_after else points.worst(max(0, first), last)
        return points.worst(points.index_ended(start) + 1, points.index_at(end - 1))

    def offset_of(self, place: Place, index: int) -> int:
        points = place.points
        if self.align == "step":
            return points.step_of(index) - (points.first_step or 0) - place.zero
        return points.start_of(index) - place.zero

    def index_at(self, place: Place, offset: int) -> int:
        """Index of the last point of a run that begins at or before an offset; -1 without one."""
        points = place.points
        if self.align == "step":
            return points.index_of_step((points.first_step or 0) + offset + place.zero)
        return points.index_at(offset + place.zero)


def axis_of(align: Align, a: Side, b: Side, pair: Pair | None) -> Axis:
    """Put two runs on one chart axis.

    `pair`: the request to align by if `align` is "request"; None: align by time instead.
    """
    if align == "step":
        num_a, num_b = _num_steps(a.points), _num_steps(b.points)
        return Axis(align, Place(a.points, 0), Place(b.points, 0), 0, max(num_a, num_b, 1))
    if align == "time" or pair is None:
        end = max(a.points.end_ns, b.points.end_ns, 1_000_000)
        return Axis("time", Place(a.points, 0), Place(b.points, 0), 0, end)
    zero_a, zero_b = _since(a, pair.a.arrival_ns), _since(b, pair.b.arrival_ns)
    life = max(_life(a, pair.a, zero_a), _life(b, pair.b, zero_b), 1_000_000)
    lead = life // 20  # also show the time before it arrived
    return Axis("request", Place(a.points, zero_a), Place(b.points, zero_b), -lead, life + lead)


def _num_steps(points: StepPoints) -> int:
    if points.first_step is None or points.last_step is None:
        return 0
    return points.last_step - points.first_step + 1


def _since(side: Side, time_ns: int) -> int:
    return time_ns - (side.totals.start_ns or time_ns)


def _life(side: Side, run: RequestRun, zero: int) -> int:
    end = side.points.end_ns if run.end_ns is None else _since(side, run.end_ns)
    return end - zero
