"""Summaries of steps in columns, so that charts need not decode the step records.

There is one array per field, with one entry per step, in order of steps. A "place" is an index in
these arrays. Unknown values are stored as -1; callers get None.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.engine.protocol.wire import StepRecord, Totals
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.series.block_sums import BlockSums
from stepscope.recordings.state.series.latency_samples import bounded
from stepscope.recordings.state.series.limits import LIMITS, Limit, limit_of
from stepscope.recordings.state.series.taken_step import NAMES, TakenStep, summary_columns

_UNKNOWN = -1


class StepSummary(NamedTuple):
    """The numbers of one step: times, tokens, requests. None is unknown.

    Times are engine time in nanoseconds.
    """

    step: int
    sequence: int  # of its record
    schedule_start_ns: int
    schedule_end_ns: int | None
    launch_ns: int | None
    tokens_ns: int
    device_ns: int | None
    knobs_version: int | None
    token_budget: int | None
    max_num_seqs: int | None
    num_prefill_tokens: int  # recomputed tokens included
    num_recomputed_tokens: int | None
    num_attended: int | None  # by prefill: for each chunk, its tokens times (they and those before)
    num_decode_tokens: int
    num_padded_tokens: int | None
    num_cached_tokens: int | None  # skipped by prefix hits, not spent
    num_output_tokens: int | None
    num_rows: int | None  # seats in use
    num_decode_rows: int | None
    num_running: int
    num_waiting: int
    num_arrived: int | None
    num_finished: int | None
    num_preempted: int | None
    kv_used: int | None
    kv_cached: int | None
    kv_empty: int | None
    num_evicted: int | None
    num_queried_tokens: int | None
    num_hit_tokens: int | None
    max_itl_ns: int | None  # longest gap that ended in this step, without operator pauses
    max_itl_request_id: int | None
    max_ttft_ns: int | None  # longest TTFT that ended in this step, without operator pauses
    max_ttft_request_id: int | None
    limit: int | None  # place in `LIMITS`
    has_knob_change: bool = False  # the first step with new values
    after_gap: bool = False  # steps or messages before it were lost
    has_mark: bool = False

    @property
    def duration_ns(self) -> int:
        return self.tokens_ns - self.schedule_start_ns

    @property
    def num_tokens(self) -> int:
        """Tokens computed for requests, without padding."""
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def num_spent_tokens(self) -> int:
        """Tokens that the step took from its token budget, padding included."""
        return self.num_tokens + (self.num_padded_tokens or 0)


NUM_COLUMNS = len(StepSummary._fields) - 3  # the flags are looked up

_PLACES = tuple(StepSummary._fields.index(name) for name in NAMES)


class Span(NamedTuple):
    """Summary of consecutive steps: maxima of their numbers, and the last known budget and seats.

    Seats are the number of requests that may run at once (`max_num_seqs`).
    """

    start_ns: int  # when the first step was scheduled
    max_prefill_tokens: int
    max_decode_tokens: int
    max_padded_tokens: int
    token_budget: int | None
    max_num_seqs: int | None
    has_preemption: bool
    max_itl_ns: int | None
    limit: Limit | None  # the most frequent; "work" only if nothing limited any of the steps
    has_knob_change: bool = False
    has_mark: bool = False


_NO_TOTALS = Totals()
_SCHEDULE_START_NS = StepSummary._fields.index("schedule_start_ns")
_PREFILL_TOKENS = StepSummary._fields.index("num_prefill_tokens")
_DECODE_TOKENS = StepSummary._fields.index("num_decode_tokens")
_PADDED_TOKENS = StepSummary._fields.index("num_padded_tokens")
_TOKEN_BUDGET = StepSummary._fields.index("token_budget")
_MAX_NUM_SEQS = StepSummary._fields.index("max_num_seqs")
_PREEMPTED = StepSummary._fields.index("num_preempted")
_MAX_ITL_NS = StepSummary._fields.index("max_itl_ns")
_LIMIT = StepSummary._fields.index("limit")


class StepColumns:
    """Columns of step summaries. One thread writes; readers must hold its lock."""

    def __init__(self) -> None:
        self._columns = [array("q") for _ in range(NUM_COLUMNS)]
        self.steps = self._columns[0]
        self.tokens_ns = self.column("tokens_ns")
        self._sums = BlockSums()

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> "array[int]":
        return self._columns[StepSummary._fields.index(name)]

    def append(
        self, sequence: int, record: StepRecord, outcome: Outcome, num_rows: int | None
    ) -> None:
        """Add a step, which must be later than the last one.

        Args:
            num_rows: number of rows in its batch; None if unknown.
        """
        kv = record.kv
        ttft = outcome.max_ttft
        # Without rows, what was in them is unknown, and a lack of events does not mean that nothing
        # happened to requests.
        has_rows = num_rows is not None
        has_events = has_rows or bool(record.events)
        totals = record.totals or _NO_TOTALS
        values = (
            record.step,
            sequence,
            record.schedule_start_ns,
            _known(record.schedule_end_ns),
            _known(record.launch_ns),
            record.tokens_ns,
            _known(record.device_ns),
            _known(record.knobs_version),
            _known(record.token_budget),
            _known(record.max_num_seqs),
            record.num_prefill_tokens,
            outcome.num_recomputed_tokens if has_rows else _UNKNOWN,
            outcome.num_attended if has_rows else _UNKNOWN,
            record.num_decode_tokens,
            _known(record.num_padded_tokens),
            outcome.num_cached_tokens if has_rows else _known(totals.num_cached_tokens),
            outcome.num_output_tokens if has_rows else _known(totals.num_output_tokens),
            _known(num_rows),
            outcome.num_decode_rows if has_rows else _UNKNOWN,
            record.num_running,
            record.num_waiting,
            outcome.num_arrived if has_events else _UNKNOWN,
            outcome.num_finished if has_events else _known(totals.num_finished),
            outcome.num_preempted if has_events else _known(totals.num_preempted),
            _UNKNOWN if kv is None else kv.used,
            _UNKNOWN if kv is None else kv.cached,
            _UNKNOWN if kv is None else kv.empty,
            _UNKNOWN if kv is None else kv.evicted,
            _known(outcome.num_queried_tokens),
            _known(outcome.num_hit_tokens),
            _known(outcome.max_gap_ns),
            _known(outcome.max_gap_request_id),
            _UNKNOWN if ttft is None else ttft[1],
            _UNKNOWN if ttft is None else ttft[0],
            limit_of(record, outcome, num_rows),
        )
        try:
            row = array("q", values)
        except OverflowError:  # absurd but valid values must not leave the columns uneven
            row = array("q", map(bounded, values))
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def extend(self, steps: Sequence[TakenStep]) -> None:
        """Add several steps, with the same result as `append` for each, in a third of the time."""
        # Built before any column changes: an error must not leave columns of unequal length.
        fresh = summary_columns(steps)
        for place, values in zip(_PLACES, fresh, strict=True):
            self._columns[place].extend(values)

    def prepend(self, earlier: "StepColumns") -> None:
        """Insert the steps of `earlier` before these."""
        for column, before in zip(self._columns, earlier._columns, strict=True):
            column[:0] = before
        self._sums = BlockSums()  # every place has moved

    def forget_before(self, step: int) -> None:
        num_old = bisect_left(self.steps, step)
        for column in self._columns:
            del column[:num_old]
        self._sums.forget_before(num_old)

    def forget_after(self, step: int) -> None:
        num_kept = bisect_right(self.steps, step)
        for column in self._columns:
            del column[num_kept:]
        self._sums.forget_after(num_kept)

    def index(self, step: int) -> int | None:
        """Index of a step in the columns; None if the step is not there."""
        index = bisect_left(self.steps, step)
        return index if index < len(self.steps) and self.steps[index] == step else None

    def index_at(self, time_ns: int) -> int:
        """Index of the last step whose tokens were known by `time_ns`; -1 before the first step."""
        return bisect_right(self.tokens_ns, time_ns) - 1

    def num_between(self, start_ns: int, last_step: int) -> int:
        """Number of steps that ended after `start_ns`, up to and including `last_step`."""
        return max(0, bisect_right(self.steps, last_step) - 1 - self.index_at(start_ns))

    def summary(self, index: int) -> StepSummary:
        values = [column[index] for column in self._columns]
        return StepSummary(*[None if value == _UNKNOWN else value for value in values])  # type: ignore[arg-type]

    def total(self, name: str, first: int, last: int) -> int | None:
        """Sum of a column over the places [first, last); None if any value is unknown."""
        column = self.column(name)

        def measure(begin: int, end: int) -> int | None:
            values = column[begin:end]
            return None if min(values) == _UNKNOWN else sum(values)

        return self._sums.total(name, first, last, measure)

    def known_total(self, name: str, first: int, last: int) -> int:
        """Sum of a column over the places [first, last), where unknown values count as 0."""
        column = self.column(name)

        def measure(begin: int, end: int) -> int:
            values = column[begin:end]
            return sum(values) if min(values) >= 0 else sum([max(0, value) for value in values])

        return self._sums.total(f"known {name}", first, last, measure) or 0

    def num_in_tokens(self, first: int, last: int) -> int | None:
        """Prompt tokens in the places [first, last): computed for the first time, or cached."""
        recomputed = self.total("num_recomputed_tokens", first, last)
        cached = self.total("num_cached_tokens", first, last)
        if recomputed is None or cached is None:
            return None
        return self.known_total("num_prefill_tokens", first, last) - recomputed + cached

    def num_mixed(self, first: int, last: int) -> int:
        """Number of steps in the places [first, last) that had both prefill and decode."""
        prefill, decode = self.column("num_prefill_tokens"), self.column("num_decode_tokens")

        def measure(begin: int, end: int) -> int:
            pairs = zip(prefill[begin:end], decode[begin:end], strict=True)
            return sum([p > 0 and d > 0 for p, d in pairs])

        return self._sums.total("mixed", first, last, measure) or 0

    def recompute_ns(self, first: int, last: int) -> int | None:
        """Time spent on recomputing preempted tokens in the places [first, last); None if unknown.

        The time of a step is divided equally among its tokens.
        """
        names = ("num_recomputed_tokens", "num_prefill_tokens", "num_decode_tokens")
        columns = [self.column(name) for name in (*names, "schedule_start_ns", "tokens_ns")]

        def measure(begin: int, end: int) -> int | None:
            again = columns[0][begin:end]
            if min(again) == _UNKNOWN:
                return None
            if not any(again):
                return 0
            found = 0
            for a, p, d, start, done in zip(*(c[begin:end] for c in columns), strict=True):
                if a:
                    found += a * (done - start) // (p + d)
            return found

        return self._sums.total("recompute_ns", first, last, measure)

    def limits(self, first: int, last: int) -> list[int]:
        """For each limit in `LIMITS`, how many steps in the places [first, last) had that limit."""
        values = self.column("limit")[first:last]
        return [values.count(code) for code in range(len(LIMITS))]

    def span(self, first_step: int, last_step: int) -> Span | None:
        """Summarize the steps `first_step` to `last_step`; None if none of them is there."""
        begin = bisect_left(self.steps, first_step)
        end = bisect_right(self.steps, last_step, begin)
        if begin == end:
            return None
        columns = self._columns

        def worst(column: int) -> int:
            values = columns[column]
            return values[begin] if begin + 1 == end else max(values[begin:end])

        return Span(
            columns[_SCHEDULE_START_NS][begin],
            worst(_PREFILL_TOKENS),
            worst(_DECODE_TOKENS),
            max(0, worst(_PADDED_TOKENS)),
            _last_known(columns[_TOKEN_BUDGET], begin, end),
            _last_known(columns[_MAX_NUM_SEQS], begin, end),
            worst(_PREEMPTED) > 0,
            _none_if_unknown(worst(_MAX_ITL_NS)),
            _most_frequent(columns[_LIMIT][begin:end]),
        )


def _none_if_unknown(value: int) -> int | None:
    return None if value == _UNKNOWN else value


def _most_frequent(limits: "array[int]") -> Limit | None:
    work = LIMITS.index("work")
    found = sorted({each for each in limits if each not in (_UNKNOWN, work)})
    if found:
        return LIMITS[max(found, key=limits.count)]
    return "work" if work in limits else None


def _last_known(column: "array[int]", begin: int, end: int) -> int | None:
    for index in range(end - 1, begin - 1, -1):
        if column[index] != _UNKNOWN:
            return column[index]
    return None


def _known(value: int | None) -> int:
    return _UNKNOWN if value is None else value
