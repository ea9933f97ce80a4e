"""`PlotSeries`: the data of a plot, one entry per pixel column.

The indexes of the recording are read, in bounded memory. Every column covers the same span of time
and keeps the maxima of the steps in it. A step longer than a column counts in each column that it
covers.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import KnobsChanged, KnobValue, Mark, StepRecord
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.moments import Progress
from stepscope.recordings.file.messages import indexes
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.file.step_range import StepRange, bounds
from stepscope.recordings.session.index import KINDS, Index, IndexRows
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.session.sums import Sums, sums_of
from stepscope.recordings.session.waits import WaitSums
from stepscope.recordings.state.series.distribution import Distribution
from stepscope.recordings.state.series.events import changed_knobs, gap_event
from stepscope.recordings.state.series.latency import SLO

EventKind: TypeAlias = Literal["knobs", "mark", "pause", "lost"]

MAX_EVENTS = 200  # most events kept of each kind
_COLUMN_VALUES, _COLUMN_BITS = 64, 7  # precision of the samples in a column


@dataclass(slots=True)
class PlotColumn:
    """The steps within the time span of one pixel column: sums and maxima; None if unknown."""

    num_steps: int = 0
    first_step: int | None = None
    # Sums over the steps, for means.
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_padded_tokens: int = 0
    num_cached_tokens: int = 0
    max_spent_tokens: int = 0
    token_budget: int | None = None  # the smallest budget
    step: Distribution | None = None
    itl: Distribution | None = None
    max_ttft_ns: int | None = None
    max_running: int | None = None
    max_waiting: int | None = None
    max_kv_used: float | None = None  # shares of all blocks
    kv_cached: float | None = None  # at the time of `max_kv_used`
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class PlotEvent:
    """An event, drawn as a line across the plot.

    `time_ns` is relative to the start of the range.
    """

    kind: EventKind
    time_ns: int
    text: str


class PlotSeries:
    """The data of a plot, filled from the indexes of a recording, in order.

    `start_ns`, `end_ns`: the range, in engine time.
    """

    def __init__(
        self, start_ns: int, end_ns: int, num_columns: int, slo: SLO, *, is_one_step: bool = True
    ) -> None:
        self.start_ns = start_ns
        self.end_ns = max(end_ns, start_ns + 1)
        self.slo = slo
        self.columns = [PlotColumn() for _ in range(num_columns)]
        self.waits = WaitSums({"itl": slo.itl_ms * 1e6, "ttft": slo.ttft_ms * 1e6})
        self.sums = Sums()
        self.events: list[PlotEvent] = []
        self.num_left_out = 0  # events beyond MAX_EVENTS
        self.pauses: list[tuple[int, int]] = []  # pauses by the operator, from the beginning on
        self.knobs: dict[str, KnobValue] = {}  # at the first step
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.num_steps = 0
        self._num_kept: Counter[EventKind] = Counter()
        self._is_one_step = is_one_step

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def add(self, index: Index, first: int, last: int) -> None:
        rows = IndexRows(index)
        table = rows.steps()
        begin, end = table.num_before(first), table.num_before(last + 1)
        for start_ns, end_ns in index.pauses:
            if self.start_ns <= start_ns <= self.end_ns:
                self.pauses.append((start_ns - self.start_ns, end_ns - self.start_ns))
            text = f"engine paused for {(end_ns - start_ns) / 1e9:,.1f} s"
            self._keep("pause", start_ns, text)
        for _, message in index.said:
            if isinstance(message, KnobsChanged):
                if text := changed_knobs(message):
                    self._keep("knobs", message.time_ns, text)
            elif isinstance(message, Mark):
                self._keep("mark", message.time_ns, message.text)
        for lost in index.lost:
            self._keep("lost", lost.time_ns, gap_event(*lost).text)
        if begin == end:
            return
        self.num_steps += end - begin
        if self.first_step is None:
            self.first_step = table.steps[begin]
        self.last_step = table.steps[end - 1]
        self.sums += sums_of(table, begin, end)
        self.waits.add(rows, begin, end, is_one_step=self._is_one_step)
        for place in range(begin, end):
            self._add_step(table.summary(place))
        kinds = rows.column("waits", "kind").tolist()
        places, waits_ns = (rows.column("waits", name).tolist() for name in ("place", "ns"))
        numbers = rows.column("waits", "number").tolist()
        for kind, place, ns, number in zip(kinds, places, waits_ns, numbers, strict=True):
            if begin <= place < end:
                column = self.columns[self._column_at(table.tokens_ns[place])]
                if KINDS[kind] == "itl":
                    column.itl = column.itl or _few_values()
                    column.itl.add(ns, number)
                elif KINDS[kind] == "ttft":
                    column.max_ttft_ns = max(column.max_ttft_ns or 0, ns)

    def _keep(self, kind: EventKind, time_ns: int, text: str) -> None:
        if not self.start_ns <= time_ns <= self.end_ns:
            return  # a mark may be set at any step, even before the range
        if self._num_kept[kind] < MAX_EVENTS:
            self._num_kept[kind] += 1
            self.events.append(PlotEvent(kind, time_ns - self.start_ns, text))
        else:
            self.num_left_out += 1

    def _column_at(self, time_ns: int) -> int:
        place = (time_ns - self.start_ns) * len(self.columns) // self.duration_ns
        return min(max(place, 0), len(self.columns) - 1)

    def _add_step(self, step: StepSummary) -> None:
        last = self._column_at(step.tokens_ns)
        first = min(self._column_at(step.schedule_start_ns), last)
        for column in self.columns[first : last + 1]:
            _add_step(column, step, is_one_step=self._is_one_step)
        self.columns[last].num_preempted += step.num_preempted or 0


def read_series(
    recording: Recording, steps: StepRange, slo: SLO, num_columns: int, progress: Progress
) -> PlotSeries:
    """Read a range of a recording. Raises RecordingError: the range contains no step."""
    first, last = bounds(recording, steps)
    begin, end = _record_at(recording, first), _record_at(recording, last)
    if begin is None or end is None:
        raise RecordingError(f"{recording.path}: its steps cannot be read")
    is_one_step = recording.info.totals_every_s is None
    start_ns = begin.schedule_start_ns
    series = PlotSeries(start_ns, end.tokens_ns, num_columns, slo, is_one_step=is_one_step)
    snapshot, _ = recording.keyframe_before(Position(0, 0))
    series.knobs = dict(snapshot.knobs)
    for number, index in indexes(recording):
        series.add(index, first, last)
        for _, message in index.said:
            if isinstance(message, KnobsChanged) and message.effective_step <= begin.step:
                series.knobs |= message.new
        progress(number / recording.num_chunks)
    series.events.sort(key=lambda event: event.time_ns)
    return series


def _record_at(recording: Recording, step: int) -> StepRecord | None:
    """The record of a step, or of the nearest one that can be read."""
    for position in (recording.find_step(step), recording.find_step(step + 1)):
        frame = None if position is None else recording.frame_before(position)
        message = None if frame is None else wire.decode(frame.payload)
        if isinstance(message, StepRecord):
            return message
    return None


def _few_values() -> Distribution:
    return Distribution(max_values=_COLUMN_VALUES, num_bits=_COLUMN_BITS)


def _add_step(column: PlotColumn, step: StepSummary, *, is_one_step: bool) -> None:
    column.num_steps += 1
    if column.first_step is None:
        column.first_step = step.step
    column.num_decode_tokens += step.num_decode_tokens
    column.num_prefill_tokens += step.num_prefill_tokens
    column.num_padded_tokens += step.num_padded_tokens or 0
    column.num_cached_tokens += step.num_cached_tokens or 0
    column.max_spent_tokens = max(column.max_spent_tokens, step.num_spent_tokens)
    budget = step.token_budget
    if budget is not None:
        column.token_budget = min(column.token_budget or budget, budget)
    if is_one_step:
        column.step = column.step or _few_values()
        column.step.add(step.duration_ns)
    column.max_running = max(column.max_running or 0, step.num_running or 0)
    column.max_waiting = max(column.max_waiting or 0, step.num_waiting or 0)
    if step.kv_used is not None and step.kv_cached is not None and step.kv_empty is not None:
        total = step.kv_used + step.kv_cached + step.kv_empty
        share = step.kv_used / total if total else None
        if share is not None and (column.max_kv_used is None or share > column.max_kv_used):
            column.max_kv_used, column.kv_cached = share, step.kv_cached / total
