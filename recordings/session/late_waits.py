"""`LateWaits`: steps with late tokens, in order, as a list from which people jump to them.

Late tokens come in swarms, so one per second is enough for such a list. `Breach`: one of them.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from stepscope.recordings.session.index import IndexRows
from stepscope.recordings.state.latency import LatencyKind
from stepscope.recordings.state.lazy_numpy import Ints, np

_SECOND_NS = 1_000_000_000


class Breach(NamedTuple):
    """A step with tokens later than a bound, and the longest wait for one of these tokens."""

    step: int
    time_ns: int
    kind: str  # TTFT or ITL
    ns: int  # length of the wait without the operator's pauses
    request_id: int
    num_tokens: int = 1  # late tokens of this kind in the step


def worst_of_seconds(times_ns: Ints, waits_ns: Ints) -> Ints:
    """The places of the longest wait of each second of engine time; of equal ones the first."""
    seconds = times_ns // _SECOND_NS
    firsts = np.flatnonzero(np.append(True, seconds[1:] != seconds[:-1])[: len(seconds)])
    second_of = np.repeat(firsts, np.diff(firsts, append=len(seconds)))
    longest = np.zeros_like(waits_ns)
    longest[firsts] = np.maximum.reduceat(waits_ns, firsts) if len(firsts) else 0
    places = np.flatnonzero(waits_ns == longest[second_of])
    return places[np.unique(second_of[places], return_index=True)[1]]


class LateWaits:
    """The longest wait of each of some steps, of one kind. Never changed.

    `rows`: of shape [5, waits], by step: step, engine time, length in nanoseconds, request, tokens
    that waited exactly so long. None: there are none.
    """

    def __init__(self, kind: LatencyKind, rows: Ints | None = None) -> None:
        self._kind = kind
        self._rows = np.empty((5, 0), dtype=np.int64) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows[0])

    @property
    def steps(self) -> list[int]:
        return list(map(int, self._rows[0]))

    def above(self, bound_ns: float) -> "LateWaits":
        return LateWaits(self._kind, self._rows[:, self._rows[2] > bound_ns])

    def of_seconds(self) -> "LateWaits":
        """The longest of each second; of equal ones the first."""
        return LateWaits(self._kind, self._rows[:, worst_of_seconds(*self._rows[1:3])])

    def with_seconds_of(self, index: IndexRows) -> "LateWaits":
        """These, which are one of each second, and one of each second of the index that follows."""
        places, *waits = index.longest(self._kind)
        steps = [index.column("steps", name)[places] for name in ("step", "tokens_ns")]
        found = np.concatenate((self._rows[:, -1:], np.array([*steps, *waits])), axis=1)
        found = found[:, found[2] > 0]
        found = found[:, worst_of_seconds(*found[1:3])]
        return LateWaits(self._kind, np.concatenate((self._rows[:, :-1], found), axis=1))

    def next(self, step: int, direction: int) -> Breach | None:
        """The nearest in a later step (direction 1) or an earlier one (-1)."""
        steps = self._rows[0]
        place = bisect_right(steps, step) if direction > 0 else bisect_left(steps, step) - 1
        return self._told(slice(place, place + 1))[0] if 0 <= place < len(self) else None

    def last(self, limit: int) -> list[Breach]:
        return self._told(slice(max(0, len(self) - limit), None))

    def longest(self, limit: int) -> list[Breach]:
        """The longest first; of equal ones the earliest."""
        return self._told((-self._rows[2]).argsort(kind="stable")[: max(0, limit)])

    def _told(self, places: slice | Ints) -> list[Breach]:
        rows = self._rows[:, places].T.tolist()
        kind = self._kind.upper()
        return [Breach(step, time_ns, kind, *waited) for step, time_ns, *waited in rows]
