"""Puts two runs on one axis: time, steps, or time since the arrival of one request."""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.points import StepPoint, StepPoints
from stepscope.recordings.compare.side import Side
from stepscope.recordings.compare.side_requests import Pair, RequestRun

Align: TypeAlias = Literal["time", "step", "request"]
ALIGNMENTS: tuple[Align, ...] = ("time", "step", "request")


class Place(NamedTuple):
    """The points of one run; `zero`: the time since its start, or the step, at offset 0."""

    points: StepPoints
    zero: int


class Axis(NamedTuple):
    """Two runs on one axis, from `start` to `end`: nanoseconds, or steps if `align` is "step"."""

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
        points, by_step = place.points, self.align == "step"
        first = points.index_ended(start + place.zero, by_step=by_step) + 1
        return points.worst(first, points.index_at(end - 1 + place.zero, by_step=by_step))

    def offset_of(self, place: Place, index: int) -> int:
        return place.points.start_of(index, by_step=self.align == "step") - place.zero

    def index_at(self, place: Place, offset: int) -> int:
        """Index of the last point of a run that begins at or before an offset; -1 without one."""
        return place.points.index_at(offset + place.zero, by_step=self.align == "step")


def axis_of(align: Align, a: Side, b: Side, pair: Pair | None) -> Axis:
    """Put two runs on one axis; aligned by `pair` if `align` is "request", without one by time."""
    if align == "step":
        firsts = [side.points.first_step or 0 for side in (a, b)]
        lasts = [side.points.last_step for side in (a, b)]
        nums = [0 if y is None else y - x + 1 for x, y in zip(firsts, lasts, strict=True)]
        places = Place(a.points, firsts[0]), Place(b.points, firsts[1])
        return Axis(align, *places, 0, max(*nums, 1))
    if align == "time" or pair is None:
        end = max(a.points.end_ns, b.points.end_ns, 1_000_000)
        return Axis("time", Place(a.points, 0), Place(b.points, 0), 0, end)
    zero_a, zero_b = _since(a, pair.a.arrival_ns), _since(b, pair.b.arrival_ns)
    life = max(_life(a, pair.a, zero_a), _life(b, pair.b, zero_b), 1_000_000)
    lead = life // 20  # also show the time before it arrived
    return Axis("request", Place(a.points, zero_a), Place(b.points, zero_b), -lead, life + lead)


def _since(side: Side, time_ns: int) -> int:
    return time_ns - (side.totals.start_ns or time_ns)


def _life(side: Side, run: RequestRun, zero: int) -> int:
    end = side.points.end_ns if run.end_ns is None else _since(side, run.end_ns)
    return end - zero
