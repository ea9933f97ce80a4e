"""`FileRun`: the figures of a recording or of its end, from its indexes, without its messages."""

from collections.abc import Callable, Mapping
from functools import cached_property

from stepscope.engine.protocol.wire import KnobsChanged, KnobValue
from stepscope.recordings.attribution.explained import explain_recording
from stepscope.recordings.compare.side import KnobChanges, knobs_between
from stepscope.recordings.figures import figures_of
from stepscope.recordings.file.messages import indexes
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.session.index import IndexRows
from stepscope.recordings.session.sums import Sums
from stepscope.recordings.session.totals import RunTotals
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import Limit


class FileRun:
    """The sums of a recorded run, a `Run`. Raises RecordingError: it cannot be read."""

    def __init__(
        self,
        recording: Recording,
        slo: SLO,
        first: int | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.slo = slo
        self._path = recording.path
        self._totals = RunTotals(slo)
        self.limited: Mapping[Limit, Sums] = self._totals.limited
        self._between = Sums()
        snapshot, _ = recording.keyframe_before(Position(0, 0))
        knobs: KnobChanges = [(-1, snapshot.knobs)]
        first = recording.first_step or 0 if first is None else first
        is_one_step = recording.info.totals_every_s is None
        for number, index in indexes(recording):
            rows = IndexRows(index)
            place = rows.steps().num_before(first)
            if place < len(rows.steps()):
                self._totals.add(rows, place, is_one_step=is_one_step)
            for _, each in index.said:
                if isinstance(each, KnobsChanged):
                    knobs.append((each.effective_step, each.new))
            arrived, finished, preempted = index.between
            self._between = Sums(
                num_arrived=arrived, num_finished=finished, num_preempted=preempted
            )
            progress(number / recording.num_chunks)
        last = recording.last_step or 0
        self.knob_values: Mapping[str, list[KnobValue]] = knobs_between(knobs, first, last)

    @property
    def num_steps(self) -> int:
        return self._totals.sums.num_records

    @cached_property
    def share_late_beside_prefill(self) -> float:
        """See `Side`; it reads the messages of the whole file."""
        with Recording(self._path) as recording:
            found = explain_recording(recording, self.slo)
        late = [each for each in found.late if each.kind == "ITL" and not each.is_excused]
        return sum(each.cause == "prefill" for each in late) / max(1, found.itl.num_waits)

    def figures(self) -> dict[str, float | None]:
        totals = self._totals
        return figures_of(totals.sums + self._between, totals.waits.spreads(), totals.kept)
