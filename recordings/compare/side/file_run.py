"""`FileRun`: the figures of a recording or of its end, from its indexes, without its messages."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from stepscope.engine.protocol.wire import KnobsChanged, KnobValue
from stepscope.recordings.attribution.explained import explain_recording
from stepscope.recordings.figures.sums import figures_of
from stepscope.recordings.file.indexes import indexes
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.session.index import Index, IndexRows
from stepscope.recordings.session.sums import Sums, limited_sums, sums_of
from stepscope.recordings.session.waits import WaitSums
from stepscope.recordings.state.series.finished import KeptLevels
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.series.limits import LIMITS, Limit


class FileRun:
    """The sums of a run that was recorded. Implements `Run`.

    Args:
        first: its first step; None: the first of the file.
        progress: called with the share that was read, 0..1.

    Raises:
        RecordingError: the recording cannot be read.
    """

    def __init__(
        self,
        recording: Recording,
        slo: SLO,
        first: int | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.slo = slo
        self.num_steps = 0
        self.limited: dict[Limit, Sums] = dict.fromkeys(LIMITS, Sums())
        self.knob_values: dict[str, list[KnobValue]] = {}
        self._path = recording.path
        self._first = recording.first_step or 0 if first is None else first
        self._sums = Sums()
        self._waits = WaitSums({"ttft": slo.ttft_ms * 1e6, "itl": slo.itl_ms * 1e6})
        self._kept = KeptLevels(0, 0)
        self._start_ns = self._end_ns = 0
        self._changes: list[KnobsChanged] = []
        is_one_step = recording.info.totals_every_s is None
        num_chunks, index = recording.num_chunks, Index()
        for number, index in indexes(recording):
            self._add(index, is_one_step=is_one_step)
            progress(number / num_chunks)
        self._sums += Sums(
            num_arrived=index.between[0],
            num_finished=index.between[1],
            num_preempted=index.between[2],
        )
        self._sums = replace(self._sums, span_ns=self._end_ns - self._start_ns)
        snapshot, _ = recording.keyframe_before(Position(0, 0))
        self._add_knobs(snapshot.knobs, recording.last_step or 0)

    @property
    def share_late_beside_prefill(self) -> float:
        """See `Side`; it reads the messages of the whole file."""
        with Recording(self._path) as recording:
            found = explain_recording(recording, self.slo.itl_ms, self.slo.ttft_ms)
        late = [each for each in found.late if each.kind == "ITL" and not each.is_excused]
        return sum(each.cause == "prefill" for each in late) / max(1, found.itl.num_waits)

    def figures(self) -> dict[str, float | None]:
        """All figures of the run."""
        return figures_of(self._sums, self._waits.spreads(), self._kept)

    def _add(self, index: Index, *, is_one_step: bool) -> None:
        self._changes += [each for _, each in index.said if isinstance(each, KnobsChanged)]
        rows = IndexRows(index)
        steps = rows.steps()
        place = steps.num_before(self._first)
        if place == len(steps):
            return
        if not self.num_steps:
            self._start_ns = self._end_ns = steps.column("schedule_start_ns")[place]
        self.num_steps += len(steps) - place
        self._sums += sums_of(steps, place, len(steps))
        for limit, sums in limited_sums(steps, place).items():
            self.limited[limit] += sums
        self._waits.add_rows(rows, place, is_one_step=is_one_step)
        self._end_ns = max(self._end_ns, *steps.tokens_ns[place:])
        chosen = rows.column("finished", "place") >= place
        ttft_ns = rows.column("finished", "ttft_ns")[chosen]
        worst_ns = rows.column("finished", "worst_itl_ns")[chosen]
        kept = (ttft_ns <= self.slo.ttft_ms * 1e6) & (worst_ns <= self.slo.itl_ms * 1e6)
        self._kept = KeptLevels(
            self._kept.num_judged + len(kept), self._kept.num_kept + int(kept.sum())
        )

    def _add_knobs(self, before: Mapping[str, KnobValue], last_step: int) -> None:
        """Note the values of each knob in force at some time."""
        in_force = dict(before)
        for change in self._changes:
            if change.effective_step <= self._first:
                in_force |= change.new
        self.knob_values = {name: [value] for name, value in in_force.items()}
        for change in self._changes:
            if self._first < change.effective_step <= last_step:
                for name, value in change.new.items():
                    values = self.knob_values.setdefault(name, [])
                    if not values or values[-1] != value:
                        values.append(value)
