"""`WaitSlices`: the latencies of a run in equal slices of its time; `Waits`: one of them."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.session.totals import TimeSlices
from stepscope.recordings.session.waits import waits_in
from stepscope.recordings.state.outcome import Outcome

# ITL is also counted apart, by whether the engine computed prompt tokens during the wait.
DECODE_ONLY, BESIDE_PREFILL = "itl_decode", "itl_prefill"
_BINS_PER_OCTAVE = 64  # about 1 % wide
_NUM_EXACT_BITS = _BINS_PER_OCTAVE.bit_length()


class WaitSlices(TimeSlices[tuple[str, int]]):
    """For each slice of a run: kind and bin of a wait -> number of waits that ended in it."""

    def __init__(self) -> None:
        super().__init__()
        self._prefill_ns: int | None = None  # when the last step with prefill ended

    def take(self, record: StepRecord, outcome: Outcome, end_ns: int, *, is_one_step: bool) -> None:
        """Add the waits of a step that ended `end_ns` after the beginning of the run."""
        now_ns = record.tokens_ns
        if record.num_prefill_tokens:
            self._prefill_ns = now_ns
        counts, prefill_ns = self.at(end_ns), self._prefill_ns
        for kind, wait_ns, weight in waits_in(record, outcome, is_one_step=is_one_step):
            at = bin_of(wait_ns)
            counts[kind, at] += weight
            if kind == "itl" and is_one_step:  # a record of an interval tells of no single step
                is_beside = prefill_ns is not None and prefill_ns > now_ns - wait_ns
                counts[BESIDE_PREFILL if is_beside else DECODE_ONLY, at] += weight


class Waits:
    """One kind of waits, in slices of the run in which they ended.

    Attributes:
        bins: the bins of all waits, in order.
        upto: shape [slices, bins]: number of waits up to the end of each bin.
        totals, count: number of waits in each slice, and in all.
    """

    def __init__(self, slices: Sequence[Counter[tuple[str, int]]], kind: str) -> None:
        import numpy as np  # not at the start of the program

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
    octave = wait_ns.bit_length() - _NUM_EXACT_BITS
    if wait_ns <= 0 or octave <= 0:
        return max(0, wait_ns)
    return octave * _BINS_PER_OCTAVE + (wait_ns >> octave)


def middle_of(at: int) -> float:
    """The middle of a bin, in nanoseconds; at least 1."""
    return max(1.0, (start_of(at) + start_of(at + 1)) / 2)


def start_of(at: int) -> int:
    """The shortest wait that belongs to a bin, in nanoseconds."""
    octave = max(0, at // _BINS_PER_OCTAVE - 1)
    return (at - octave * _BINS_PER_OCTAVE) << octave
