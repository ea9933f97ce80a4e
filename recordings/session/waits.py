"""`WaitSums`: how long the waits of a session were, in bounded memory.

`Waits`: one latency of a run, counted in bins, in equal slices of the run's time.
`LateWaits`: steps with late tokens, in order, as a list from which people jump to them. Late tokens
come in swarms, so one per second is enough for such a list.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.recordings.session.index import KINDS, IndexRows
from stepscope.recordings.state.distribution import Distribution, LatencySpread
from stepscope.recordings.state.latency import LatencyKind
from stepscope.recordings.state.lazy_numpy import Ints, np

STEP_TIMES = ("schedule_start_ns", "tokens_ns")


class WaitSums:
    """The latencies of a session, summed up index by index. Only one thread may write.

    `levels`: latency -> nanoseconds: a longer wait breaks the service level.
    """

    def __init__(self, levels: Mapping[LatencyKind, float]) -> None:
        self.of = {kind: Distribution(levels.get(kind)) for kind in KINDS}

    def add(
        self, rows: IndexRows, first: int = 0, end: int | None = None, *, is_one_step: bool = True
    ) -> None:
        """Add the waits that ended in the steps of an index in the places [first, end)."""
        end = len(rows.steps()) if end is None else end
        place, kinds = rows.column("waits", "place"), rows.column("waits", "kind")
        ns, number = rows.column("waits", "ns"), rows.column("waits", "number")
        found: list[tuple[LatencyKind, Ints, Ints]] = []
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


# ITL is also counted apart, by whether the engine computed prompt tokens during the wait.
DECODE_ONLY, BESIDE_PREFILL = "itl_decode", "itl_prefill"
_BINS_PER_OCTAVE = 64  # about 1 % wide
_NUM_EXACT_BITS = _BINS_PER_OCTAVE.bit_length()
NUM_BINS = _BINS_PER_OCTAVE * 64  # of numbers of 64 bits


class Waits:
    """One kind of waits, in slices of the run in which they ended.

    `upto`: shape [slices, bins]: number of waits up to the end of each bin.
    """

    def __init__(self, slices: Sequence[Counter[tuple[str, int]]], kind: str) -> None:
        self.bins = sorted({at for each in slices for name, at in each if name == kind})
        places = {at: place for place, at in enumerate(self.bins)}
        counts = np.zeros((len(slices), len(self.bins)))
        for row, each in zip(counts, slices, strict=True):
            for (name, at), number in each.items():
                if name == kind:
                    row[places[at]] = number
        self.upto = counts.cumsum(1)
        self.totals: list[float] = counts.sum(1).tolist()
        self.count = int(counts.sum())

    def percentile(self, rank: int) -> int | None:
        """The bin of the nearest-rank percentile; None without waits."""
        place = int((self.upto.sum(0) < self.count * rank / 100 - 1e-9).sum())
        return self.bins[place] if self.bins else None

    def percentile_ms(self, rank: int) -> float | None:
        """A percentile, exact to about 1 %; None without waits."""
        at = self.percentile(rank)
        return None if at is None else middle_of(at) / 1e6

    def within(self, at: int) -> list[float]:
        """For each slice, the number of waits up to the end of a bin."""
        place = bisect_right(self.bins, at)
        found: list[float] = self.upto[:, place - 1].tolist() if place else [0.0] * len(self.upto)
        return found


def bin_of(wait_ns: int) -> int:
    """The histogram bin of a wait. Bins grow with the wait and are about 1 % of it wide."""
    return int(bins_of(np.array([wait_ns]))[0])


def bins_of(waits_ns: Ints) -> Ints:
    waits_ns = np.maximum(waits_ns, 0)
    num_bits = np.frexp(waits_ns.astype(float))[1]  # one more just below 2^n if huge: same bin
    octaves = np.maximum(num_bits - _NUM_EXACT_BITS, 0)
    bins: Ints = octaves * _BINS_PER_OCTAVE + (waits_ns >> octaves)
    return bins


def middle_of(at: int) -> float:
    """The middle of a bin, in nanoseconds; at least 1."""
    return max(1.0, (start_of(at) + start_of(at + 1)) / 2)


def start_of(at: int) -> int:
    """The shortest wait that belongs to a bin, in nanoseconds."""
    octave = max(0, at // _BINS_PER_OCTAVE - 1)
    return (at - octave * _BINS_PER_OCTAVE) << octave


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
