"""`SlicedWaits`: all latencies of a run, by the time they ended and by kind of work."""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.compare.side.slices import Slice, WaitSlices, size_class
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.series.latency import LatencyKind

NUM_STRETCHES = 10

Stretches: TypeAlias = dict[LatencyKind, list[Slice]]  # of a whole run, at most `NUM_STRETCHES`


class GapWork(NamedTuple):
    """What the engine did while a request waited for its next token.

    Attributes:
        has_prefill: whether it computed prompt tokens, in the last step of the wait or before.
        decodes: size class of the number of tokens decoded in the step that ended the wait.
    """

    has_prefill: bool
    decodes: int


class WorkClass(NamedTuple):
    """How many prompt and decode tokens a step computed, as size classes (`slices.size_class`)."""

    prefill: int
    decodes: int


class SlicedWaits:
    """All latencies of one run. Only one thread may write."""

    def __init__(self) -> None:
        self.ttft = WaitSlices()
        self.itl = WaitSlices()
        self.tpot = WaitSlices()
        self.e2e = WaitSlices()
        self.step = WaitSlices()
        self._prefill_ns: int | None = None  # when the last step with prefill ended

    def take(self, record: StepRecord, outcome: Outcome, end_ns: int) -> None:
        """Add the latencies of a step that ended `end_ns` after the beginning of the run."""
        now_ns = record.tokens_ns
        if record.num_prefill_tokens:
            self._prefill_ns = now_ns
        prefill_ns = self._prefill_ns
        decodes = size_class(record.num_decode_tokens)
        work = WorkClass(size_class(record.num_prefill_tokens), decodes)
        self.step.add(end_ns, now_ns - record.schedule_start_ns, stratum=work)
        for gap_ns, weight in outcome.gaps_ns.items():
            has_prefill = prefill_ns is not None and prefill_ns > now_ns - gap_ns
            self.itl.add(end_ns, gap_ns, weight, GapWork(has_prefill, decodes))
        _add_all(self.ttft, end_ns, outcome.ttft_ns)
        _add_all(self.tpot, end_ns, outcome.tpot_ns)
        _add_all(self.e2e, end_ns, outcome.e2e_ns)

    def stretches(self) -> Stretches:
        """The waits so far, by latency, merged into at most `NUM_STRETCHES` slices of time."""
        kinds: dict[LatencyKind, WaitSlices] = {
            "ttft": self.ttft, "itl": self.itl, "tpot": self.tpot, "e2e": self.e2e,
            "step": self.step,
        }  # fmt: skip
        return {kind: waits.grouped(NUM_STRETCHES) for kind, waits in kinds.items()}


def _add_all(slices: WaitSlices, end_ns: int, samples: Iterable[tuple[int, int]]) -> None:
    for _, wait_ns in samples:
        slices.add(end_ns, wait_ns)
