"""`WorstWaits`: the longest ITL (or TTFT) of each second of a file, in a few bytes each."""

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from stepscope.recordings.attribution.longest import Breach, worst_of_seconds
from stepscope.recordings.session.index import IndexRows
from stepscope.recordings.state.series.latency import LatencyKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class WorstWaits:
    """The longest wait of each second of engine time; of equal ones the first.

    Late tokens come in swarms, so one per second is enough for a list from which people jump to
    steps. The longest wait of a second serves for all service levels. One thread adds, any number
    read: what they read is replaced, never changed. `num_tokens` of a breach is the tokens of its
    step with exactly this wait.
    """

    def __init__(self, kind: LatencyKind) -> None:
        self._kind = kind
        self._rows: NDArray[np.int64] | None = None  # step, time, ns, request, tokens

    def __len__(self) -> int:
        return 0 if self._rows is None else self._rows.shape[1]

    def add(self, rows: IndexRows) -> None:
        """Add the waits of the next steps of the file."""
        import numpy as np

        places, *waits = rows.longest(self._kind)
        steps = [rows.column("steps", name)[places] for name in ("step", "tokens_ns")]
        fresh = np.array([*steps, *waits])
        known = self._rows
        found = fresh if known is None else np.concatenate((known[:, -1:], fresh), axis=1)
        found = found[:, found[2] > 0]
        found = found[:, worst_of_seconds(found[1], found[2])]
        self._rows = found if known is None else np.concatenate((known[:, :-1], found), axis=1)

    def next(self, step: int, direction: int, bound_ns: float) -> Breach | None:
        """The nearest wait above a bound in a later step (direction 1) or an earlier one (-1)."""
        if (rows := self._rows) is None:
            return None
        steps, late = rows[0], rows[2] > bound_ns
        if direction > 0:
            begin = bisect_right(steps, step)
            places = late[begin:].nonzero()[0][:1] + begin
        else:
            places = late[: bisect_left(steps, step)].nonzero()[0][-1:]
        return self._breach(rows[:, places[0]].tolist()) if len(places) else None

    def longest(self, limit: int, bound_ns: float) -> list[Breach]:
        """The longest waits above a bound, longest first, then earliest."""
        if (rows := self._rows) is None:
            return []
        late = rows[:, rows[2] > bound_ns]
        order = (-late[2]).argsort(kind="stable")[:limit]
        return [self._breach(each) for each in late[:, order].T.tolist()]

    def num_above(self, bound_ns: float) -> int:
        """How many seconds have a wait above a bound."""
        return 0 if self._rows is None else int((self._rows[2] > bound_ns).sum())

    def _breach(self, row: list[int]) -> Breach:
        step, time_ns, ns, request_id, num_tokens = row
        return Breach(step, time_ns, self._kind.upper(), ns, request_id, num_tokens)
