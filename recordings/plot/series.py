"""`PlotSeries`: the data of a plot, one entry per pixel column.

The recording is read once, message by message, in bounded memory. Every column covers the same span
of time and keeps the maxima of the steps in it. A step longer than a column counts in each column
that it covers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import KnobsChanged, KnobValue, Mark, StepRecord
from stepscope.recordings.export.moments import Moment, Progress, StepRange, moments
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.session.totals import RunTotals
from stepscope.recordings.session.waits import WaitSums, waits_in
from stepscope.recordings.state.outcome import AppliedStep, Outcome
from stepscope.recordings.state.series.distribution import Distribution
from stepscope.recordings.state.series.events import changed_knobs
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
    max_cached_tokens: int = 0
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
    """The data of a plot, filled from the messages of a range of a recording, in order.

    Args:
        start_ns, end_ns: the range, in engine time.
        num_columns: number of pixel columns of the plot.
    """

    def __init__(self, start_ns: int, end_ns: int, num_columns: int, slo: SLO) -> None:
        self.start_ns = start_ns
        self.end_ns = max(end_ns, start_ns + 1)
        self.slo = slo
        self.columns = [PlotColumn() for _ in range(num_columns)]
        self.waits = WaitSums({"itl": slo.itl_ms * 1e6, "ttft": slo.ttft_ms * 1e6})
        self.totals = RunTotals()
        self.events: list[PlotEvent] = []
        self.num_left_out = 0  # events beyond MAX_EVENTS
        self.pauses: list[tuple[int, int]] = []  # pauses by the operator, from the beginning on
        self.knobs: dict[str, KnobValue] = {}  # at the first step
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.num_steps = 0
        self._num_kept: Counter[EventKind] = Counter()
        self._last_ns = start_ns  # end of the step before

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def take(self, moment: Moment) -> None:
        """Process the next message."""
        message = moment.message
        if isinstance(message, StepRecord):
            assert moment.outcome is not None
            self._take_step(message, moment)
        elif isinstance(message, KnobsChanged):
            if text := changed_knobs(message):
                self._keep("knobs", message.time_ns, text)
        elif isinstance(message, Mark):
            self._keep("mark", message.time_ns, message.text)

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

    def _take_step(self, record: StepRecord, moment: Moment) -> None:
        outcome = moment.outcome
        assert outcome is not None
        self.num_steps += 1
        if self.first_step is None:
            self.first_step = record.step
            self.knobs = dict(moment.state.knobs)
        self.last_step = record.step
        num_rows = None if record.batch is None else len(record.batch)
        is_one_step = not moment.state.is_summed_up
        applied = AppliedStep(moment.sequence, record, outcome, num_rows, is_one_step)
        self.totals.append(applied, max(0, record.tokens_ns - self.start_ns))
        for start_ns, end_ns in moment.state.pauses.parts(self._last_ns, record.schedule_start_ns):
            self.pauses.append((start_ns - self.start_ns, end_ns - self.start_ns))
            self._keep("pause", start_ns, f"engine paused for {(end_ns - start_ns) / 1e9:,.1f} s")
        if moment.after_gap and self.num_steps > 1:
            self._keep(
                "lost", record.schedule_start_ns, f"records lost before step {record.step:,}"
            )
        self._last_ns = record.tokens_ns
        step_ns = record.tokens_ns - record.schedule_start_ns
        last = self._column_at(record.tokens_ns)
        first = min(self._column_at(record.schedule_start_ns), last)
        for place in range(first, last + 1):
            _add_step(self.columns[place], record, outcome, step_ns if is_one_step else None)
        column = self.columns[last]
        column.num_preempted += outcome.num_preempted
        for kind, ns, weight in waits_in(record, outcome, is_one_step=is_one_step):
            self.waits.of[kind].add(ns, weight)
            if kind == "itl":
                column.itl = column.itl or _few_values()
                column.itl.add(ns, weight)
            elif kind == "ttft":
                column.max_ttft_ns = max(column.max_ttft_ns or 0, ns)


def read_series(
    recording: Recording, steps: StepRange, slo: SLO, num_columns: int, progress: Progress
) -> PlotSeries:
    """Read a range of a recording.

    Raises:
        RecordingError: the range contains no step.
    """
    series: PlotSeries | None = None
    for moment in _from_first_step(moments(recording, steps, progress)):
        if series is None:
            assert isinstance(moment.message, StepRecord)
            start_ns = moment.message.schedule_start_ns
            end_ns = _end_of(recording, steps.last) or moment.message.tokens_ns
            series = PlotSeries(start_ns, end_ns, num_columns, slo)
        series.take(moment)
    assert series is not None, "moments() has raised where there is no step"
    return series


def _from_first_step(source: Iterable[Moment]) -> Iterable[Moment]:
    begun = False
    for moment in source:
        begun = begun or isinstance(moment.message, StepRecord)
        if begun:
            yield moment


def _end_of(recording: Recording, step: int | None) -> int | None:
    """Return the engine time at which a step ended, or the last recorded step before it.

    Args:
        step: its number; None: the last step of the file.
    """
    last = recording.last_step or 0
    position = recording.find_step(last if step is None else min(step, last))
    frame = None if position is None else recording.frame_before(position)
    message = None if frame is None else wire.decode(frame.payload)
    return message.tokens_ns if isinstance(message, StepRecord) else None


def _few_values() -> Distribution:
    return Distribution(max_values=_COLUMN_VALUES, num_bits=_COLUMN_BITS)


def _add_step(
    column: PlotColumn, record: StepRecord, outcome: Outcome, step_ns: int | None
) -> None:
    column.num_steps += 1
    if column.first_step is None:
        column.first_step = record.step
    padded = record.num_padded_tokens or 0
    column.num_decode_tokens += record.num_decode_tokens
    column.num_prefill_tokens += record.num_prefill_tokens
    column.num_padded_tokens += padded
    column.num_cached_tokens += outcome.num_cached_tokens
    spent = record.num_decode_tokens + record.num_prefill_tokens + padded
    column.max_spent_tokens = max(column.max_spent_tokens, spent)
    column.max_cached_tokens = max(column.max_cached_tokens, outcome.num_cached_tokens)
    budget = record.token_budget
    if budget is not None:
        column.token_budget = min(column.token_budget or budget, budget)
    if step_ns is not None:
        column.step = column.step or _few_values()
        column.step.add(step_ns)
    column.max_running = max(column.max_running or 0, record.num_running)
    column.max_waiting = max(column.max_waiting or 0, record.num_waiting)
    kv = record.kv
    total = 0 if kv is None else kv.used + kv.cached + kv.empty
    if kv is not None and total:
        share = kv.used / total
        if column.max_kv_used is None or share > column.max_kv_used:
            column.max_kv_used, column.kv_cached = share, kv.cached / total
