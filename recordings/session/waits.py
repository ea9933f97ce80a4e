"""`WaitSums`: how long the waits of a session were, in bounded memory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stepscope.recordings.session.index import KINDS, IndexRows
from stepscope.recordings.state.series.distribution import Distribution, LatencySpread
from stepscope.recordings.state.series.latency import LatencyKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP_TIMES = ("schedule_start_ns", "tokens_ns")


class WaitSums:
    """The latencies of a session, summed up index by index. Only one thread may write.

    Args:
        levels: latency -> nanoseconds: a longer wait breaks the service level.
    """

    def __init__(self, levels: Mapping[LatencyKind, float]) -> None:
        self.of = {kind: Distribution(levels.get(kind)) for kind in KINDS}

    def add(
        self, rows: IndexRows, first: int = 0, end: int | None = None, *, is_one_step: bool = True
    ) -> None:
        """Add the waits that ended in the steps of an index in the places [first, end)."""
        import numpy as np

        end = rows.number("steps") if end is None else end
        place, kinds = rows.column("waits", "place"), rows.column("waits", "kind")
        ns, number = rows.column("waits", "ns"), rows.column("waits", "number")
        found: list[tuple[LatencyKind, NDArray[np.int64], NDArray[np.int64]]] = []
        for code, kind in enumerate(KINDS):
            chosen = (kinds == code) & (place >= first) & (place < end)
            found.append((kind, ns[chosen], number[chosen]))
        if is_one_step:
            starts, ends = (rows.column("steps", name)[first:end] for name in STEP_TIMES)
            found.append(("step", ends - starts, np.ones(len(starts), dtype=np.int64)))
        for kind, waits_ns, numbers in found:
            distribution = self.of[kind]
            for wait_ns, weight in zip(waits_ns.tolist(), numbers.tolist(), strict=True):
                distribution.add(wait_ns, weight)

    def spreads(self) -> dict[LatencyKind, LatencySpread]:
        """The percentiles of all latencies."""
        return {kind: waits.spread() for kind, waits in self.of.items()}

    @property
    def error(self) -> float:
        """By which share of itself a percentile may be too small; 0 while all are exact."""
        return max(waits.error for waits in self.of.values())
