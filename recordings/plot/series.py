"""`PlotSeries`: the data of a plot, an array of each kind with one entry per pixel column.

The indexes of the recording are read, in bounded memory. Every column covers the same span of time
and keeps the maxima of the steps in it. A step longer than a column counts in each column that it
covers.
"""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import KnobsChanged, KnobValue, Mark, StepRecord
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.moments import Progress
from stepscope.recordings.file.messages import indexes
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.file.step_range import StepRange, bounds
from stepscope.recordings.session.index import KINDS, Index, IndexRows
from stepscope.recordings.session.sums import Sums, sums_of
from stepscope.recordings.session.waits import STEP_TIMES, WaitSums
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.events import changed_knobs, gap_event
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.lazy_numpy import Ints, np

EventKind: TypeAlias = Literal["knobs", "mark", "pause", "lost"]

_COLUMN_VALUES, _COLUMN_BITS = 64, 7  # precision of the samples in a column
_SPENT = ("num_decode_tokens", "num_prefill_tokens", "num_padded_tokens")
_SUMMED = (*_SPENT, "num_cached_tokens")
_MOST = ("num_spent_tokens", "num_running", "num_waiting")
_KV = ("kv_used", "kv_cached", "kv_empty")
_COLUMNS = (
    "step", *STEP_TIMES, "token_budget", "num_running", "num_waiting", "num_preempted",
    *_SUMMED, *_KV,
)  # fmt: skip


class PlotEvent(NamedTuple):
    """An event, drawn as a line across the plot."""

    kind: EventKind
    time_ns: int  # since the start of the range
    text: str


class PlotSeries:
    """The data of a plot, filled from the indexes of a recording, in order.

    `start_ns`, `end_ns`: the range, in engine time.

    Attributes, with an entry per column; NaN or None without a step in it:
        counts: the number of its steps and, by column of the table, sums over them, for means.
        most: by column of the table, the largest value of its steps.
        kv_used, kv_cached: shares of all blocks, of the step with most in use.
        steps, itls: how long its steps were, and the gaps between tokens that ended in it.
    """

    def __init__(
        self, start_ns: int, end_ns: int, num_columns: int, slo: SLO, *, is_one_step: bool
    ) -> None:
        unknown = np.full(num_columns, np.nan)
        self.num_columns = num_columns
        self.start_ns = start_ns
        self.end_ns = max(end_ns, start_ns + 1)
        self.slo = slo
        self.counts = {name: np.zeros(num_columns) for name in ("num_steps", *_SUMMED)}
        self.most = {name: unknown.copy() for name in _MOST}
        self.budget, self.first_steps = unknown.copy(), unknown.copy()  # the smallest of each
        self.kv_used, self.kv_cached = unknown.copy(), unknown.copy()
        self.ttft_ns = unknown.copy()  # the longest
        self.num_preempted = np.zeros(num_columns)
        self.steps, self.itls = (
            [Distribution(max_values=_COLUMN_VALUES, num_bits=_COLUMN_BITS) for _ in unknown]
            for _ in range(2)
        )
        self.waits = WaitSums({"itl": slo.itl_ms * 1e6, "ttft": slo.ttft_ms * 1e6})
        self.sums = Sums()
        self.events: list[PlotEvent] = []
        self.pauses: list[tuple[int, int]] = []  # pauses by the operator, from the beginning on
        self.knobs: dict[str, KnobValue] = {}  # at the first step
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._is_one_step = is_one_step

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def add(self, index: Index, first: int, last: int) -> None:
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
        rows = IndexRows(index)
        table = rows.steps()
        begin, end = table.num_before(first), table.num_before(last + 1)
        if begin == end:
            return
        if self.first_step is None:
            self.first_step = table.steps[begin]
        self.last_step = table.steps[end - 1]
        self.sums += sums_of(table, begin, end)
        self.waits.add(rows, begin, end, is_one_step=self._is_one_step)
        self._add_steps({name: rows.column("steps", name)[begin:end] for name in _COLUMNS})
        places, kinds, waits_ns, numbers = (
            rows.column("waits", name) for name in ("place", "kind", "ns", "number")
        )
        at = self._columns_at(rows.column("steps", "tokens_ns")[places])
        is_inside = (places >= begin) & (places < end)
        is_itl, is_ttft = (is_inside & (kinds == KINDS.index(kind)) for kind in ("itl", "ttft"))
        np.fmax.at(self.ttft_ns, at[is_ttft], waits_ns[is_ttft])
        gaps = (each[is_itl].tolist() for each in (at, waits_ns, numbers))
        for column, gap_ns, number in zip(*gaps, strict=True):
            self.itls[column].add(gap_ns, number)

    def _add_steps(self, steps: dict[str, Ints]) -> None:
        first, last = (self._columns_at(steps[name]) for name in STEP_TIMES)
        first = np.minimum(first, last)
        number = last - first + 1
        row = np.repeat(np.arange(len(number)), number)
        at = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
        np.add.at(self.counts["num_steps"], at, 1)
        known = {name: np.maximum(values, 0) for name, values in steps.items()}
        for name in _SUMMED:
            np.add.at(self.counts[name], at, known[name][row])
        known["num_spent_tokens"] = np.sum([known[name] for name in _SPENT], axis=0)
        for name, most in self.most.items():
            np.fmax.at(most, at, known[name][row])
        np.fmin.at(self.first_steps, at, steps["step"][row])
        budget = steps["token_budget"]
        np.fmin.at(self.budget, at, np.where(budget < 0, np.nan, budget)[row])
        np.add.at(self.num_preempted, last, known["num_preempted"])
        took_ns = steps["tokens_ns"] - steps["schedule_start_ns"]
        if self._is_one_step:
            for column, ns in zip(at.tolist(), took_ns[row].tolist(), strict=True):
                self.steps[column].add(ns)
        used, cached, empty = (steps[name] for name in _KV)
        total = used + cached + empty
        is_known = (np.minimum(np.minimum(used, cached), empty) >= 0) & (total > 0)
        total[~is_known] = 1
        share = np.where(is_known, used / total, np.nan)[row]
        np.fmax.at(self.kv_used, at, share)
        most = np.flatnonzero(share == self.kv_used[at])[::-1]  # of equal ones the first
        self.kv_cached[at[most]] = (cached / total)[row[most]]

    def _keep(self, kind: EventKind, time_ns: int, text: str) -> None:
        if self.start_ns <= time_ns <= self.end_ns:  # a mark may be set at any step
            self.events.append(PlotEvent(kind, time_ns - self.start_ns, text))

    def _columns_at(self, times_ns: Ints) -> Ints:
        shares = (times_ns - self.start_ns) / self.duration_ns
        return (shares * self.num_columns).astype(int).clip(0, self.num_columns - 1)


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
    for position in (recording.find_step(step), recording.find_step(step + 1)):
        frame = None if position is None else recording.frame_before(position)
        message = None if frame is None else wire.decode(frame.payload)
        if isinstance(message, StepRecord):
            return message
    return None
