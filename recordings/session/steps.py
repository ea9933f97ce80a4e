"""`StepTable`: one row of numbers for each step, so that charts and sums need not decode records.

`StepSummary` declares the columns. Rows are in order of steps; a "place" is the index of a row.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter, sub
from typing import NamedTuple

from stepscope.engine.protocol.wire import Totals
from stepscope.recordings.state.latency_samples import bounded
from stepscope.recordings.state.lazy_numpy import Ints, np
from stepscope.recordings.state.limits import LIMITS, Limit, limit_of
from stepscope.recordings.state.limits import UNKNOWN as UNKNOWN
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.ranks import waited_for

PPM = 1_000_000


class StepSummary(NamedTuple):
    """The numbers of one step: times, tokens, requests. None is unknown.

    Times are engine time in nanoseconds.
    """

    step: int
    sequence: int  # of its record
    num_steps: int | None  # forward steps in the record: 1, unless it sums up an interval
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
    num_in_tokens: int | None  # of prompts: first computed, or skipped by a prefix hit
    num_output_tokens: int | None
    num_rows: int | None  # seats in use
    num_decode_rows: int | None
    num_running: int | None
    num_waiting: int | None
    num_arrived: int | None
    num_finished: int | None
    num_preempted: int | None
    kv_used: int | None
    kv_cached: int | None
    kv_empty: int | None
    kv_used_ppm: int | None  # of the KV cache, if the engine tells the share alone
    num_evicted: int | None
    num_queried_tokens: int | None
    num_hit_tokens: int | None
    max_itl_ns: int | None  # longest gap that ended in this step, without operator pauses
    max_itl_request_id: int | None
    max_ttft_ns: int | None  # longest TTFT that ended in this step, without operator pauses
    max_ttft_request_id: int | None
    limit: int | None  # place in `LIMITS`
    num_drafted_tokens: int | None  # guessed tokens that the step checked
    num_accepted_tokens: int | None  # those of them that were right
    num_evicted_tokens: int | None  # of prompts, computed again because they had been evicted
    num_diverged_tokens: int | None  # of prompts that begin like an earlier one
    num_more_hits_1_5x: int | None  # prompt tokens that a pool 1.5 x as large would have hit, too
    num_more_hits_2x: int | None  # ... and one twice as large would
    waited_rank: int | None  # of several ranks, the one that the others waited for
    rank_wait_ns: int | None  # how long they waited
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


COLUMNS = StepSummary._fields[:-3]  # the flags are looked up
_PLACES = {name: place for place, name in enumerate(COLUMNS)}
_NO_TOTALS = Totals()
_NO_KV = (UNKNOWN,) * 3
_NO_MISSES, _UNKNOWN_MISSES = (0,) * 4, (UNKNOWN,) * 4
_NO_RANK = (UNKNOWN,) * 2


class Span(NamedTuple):
    """Summary of consecutive steps: maxima of their numbers, and the last known budget."""

    start_ns: int  # when the first step was scheduled
    max_prefill_tokens: int
    max_decode_tokens: int
    max_padded_tokens: int
    token_budget: int | None
    has_preemption: bool
    max_itl_ns: int | None
    longest_ns: int  # of a step, from its scheduling to its tokens
    usual_ns: int  # the median of those
    limit: Limit | None  # the most frequent; "work" only if nothing limited any of the steps
    has_knob_change: bool = False
    has_mark: bool = False


class StepTable:
    """The rows of a session's steps, as one array for each column.

    One thread writes; readers must hold its lock.
    """

    def __init__(self, columns: "list[array[int]] | None" = None) -> None:
        self._columns = columns or [array("q") for _ in COLUMNS]
        self.steps = self.column("step")
        self.tokens_ns = self.column("tokens_ns")

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> "array[int]":
        return self._columns[_PLACES[name]]

    def values(self, name: str) -> Ints:
        """The numbers of a column. As long as they are in use, no row can be added or removed."""
        return np.frombuffer(self.column(name), dtype=np.int64)

    def append(self, applied: AppliedStep) -> None:
        """Add a row. Its step must be later than the last one."""
        for column, value in zip(self._columns, _whole(_row(applied)), strict=True):
            column.append(value)

    def prepend(self, earlier: "StepTable") -> None:
        for column, before in zip(self._columns, earlier._columns, strict=True):
            column[:0] = before

    def forget_before(self, step: int) -> None:
        num_old = bisect_left(self.steps, step)
        for column in self._columns:
            del column[:num_old]

    def forget_after(self, step: int) -> None:
        num_kept = bisect_right(self.steps, step)
        for column in self._columns:
            del column[num_kept:]

    def num_before(self, step: int) -> int:
        return bisect_left(self.steps, step)

    def index(self, step: int) -> int | None:
        """Place of a step; None if the step is not there."""
        index = bisect_left(self.steps, step)
        return index if index < len(self.steps) and self.steps[index] == step else None

    def index_at(self, time_ns: int) -> int:
        """Place of the last step whose tokens were known by `time_ns`; -1 before the first step."""
        return bisect_right(self.tokens_ns, time_ns) - 1

    def places(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """The steps that ended in (start_ns, end_ns], as a range [first, last) of places."""
        return bisect_right(self.tokens_ns, start_ns), bisect_right(self.tokens_ns, end_ns)

    def summary(self, index: int) -> StepSummary:
        values = [column[index] for column in self._columns]
        return StepSummary(*[None if value == UNKNOWN else value for value in values])  # type: ignore[arg-type]

    def span(self, first_step: int, last_step: int) -> Span | None:
        """Summarize the steps `first_step` to `last_step`; None if none of them is there."""
        begin = bisect_left(self.steps, first_step)
        end = bisect_right(self.steps, last_step, begin)
        if begin == end:
            return None

        def worst(name: str) -> int:
            return max(self.column(name)[begin:end])

        max_itl_ns = worst("max_itl_ns")
        starts_ns = self.column("schedule_start_ns")[begin:end]
        budgets = reversed(self.column("token_budget")[begin:end])
        took_ns = sorted(map(sub, self.tokens_ns[begin:end], starts_ns))
        return Span(
            starts_ns[0],
            worst("num_prefill_tokens"),
            worst("num_decode_tokens"),
            max(0, worst("num_padded_tokens")),
            next((each for each in budgets if each != UNKNOWN), None),
            worst("num_preempted") > 0,
            None if max_itl_ns == UNKNOWN else max_itl_ns,
            took_ns[-1],
            took_ns[len(took_ns) // 2],
            _most_frequent(self.column("limit")[begin:end]),
        )


def _row(applied: AppliedStep) -> tuple[int, ...]:
    sequence, record, outcome, is_one_step = applied
    # Without rows, what was in them is unknown, and a lack of events does not mean that nothing
    # happened to requests.
    has_rows = record.batch is not None
    has_events = has_rows or bool(record.events)
    totals, kv = record.totals or _NO_TOTALS, record.kv
    is_load_known = totals.is_load_known
    prefill = record.num_prefill_tokens
    recomputed, cached = outcome.num_recomputed_tokens, outcome.num_cached_tokens
    gaps_ns, ttft = outcome.gaps_ns, max(outcome.ttft_ns, key=itemgetter(1), default=None)
    gap_ns = max(gaps_ns) if gaps_ns else UNKNOWN
    misses = outcome.num_missed_tokens if has_events else None
    if outcome.num_queried_tokens == 0:  # the prefix cache may be off
        misses = _NO_MISSES
    return (
        record.step,
        sequence,
        1 if is_one_step else _known(totals.num_steps),
        record.schedule_start_ns,
        _known(record.schedule_end_ns),
        _known(record.launch_ns),
        record.tokens_ns,
        _known(record.device_ns),
        _known(record.knobs_version),
        _known(record.token_budget),
        _known(record.max_num_seqs),
        prefill,
        recomputed if has_rows and is_one_step else UNKNOWN,
        outcome.num_attended if has_rows else UNKNOWN,
        record.num_decode_tokens,
        _known(record.num_padded_tokens),
        cached if has_rows else _known(totals.num_cached_tokens),
        prefill - recomputed + cached if has_rows else _known(totals.num_prompt_tokens),
        outcome.num_output_tokens if has_rows else _known(totals.num_output_tokens),
        UNKNOWN if record.batch is None else len(record.batch),
        outcome.num_decode_rows if has_rows else UNKNOWN,
        record.num_running if is_load_known else UNKNOWN,
        record.num_waiting if is_load_known else UNKNOWN,
        outcome.num_arrived if has_events else UNKNOWN,
        outcome.num_finished if has_events else _known(totals.num_finished),
        outcome.num_preempted if has_events and is_one_step else _known(totals.num_preempted),
        *(_NO_KV if kv is None else (kv.used, kv.cached, kv.empty)),
        UNKNOWN if totals.kv_used is None else round(totals.kv_used * PPM),
        UNKNOWN if kv is None else kv.evicted,
        _known(outcome.num_queried_tokens),
        _known(outcome.num_hit_tokens),
        gap_ns,
        outcome.gap_request_ids[gap_ns] if gaps_ns else UNKNOWN,
        UNKNOWN if ttft is None else ttft[1],
        UNKNOWN if ttft is None else ttft[0],
        limit_of(record, outcome),
        sum(each.num_drafted for each in record.drafts or ()) if has_rows else UNKNOWN,
        sum(each.num_accepted for each in record.drafts or ()) if has_rows else UNKNOWN,
        *(misses or _UNKNOWN_MISSES),
        *(waited_for(record.ranks or ()) or _NO_RANK),
    )


def _known(value: int | None) -> int:
    return UNKNOWN if value is None else value


def _whole(values: Sequence[int]) -> "array[int]":
    try:
        return array("q", values)
    except OverflowError:  # absurd but valid
        return array("q", map(bounded, values))


def _most_frequent(limits: "array[int]") -> Limit | None:
    work = LIMITS.index("work")
    found = sorted({each for each in limits if each not in (UNKNOWN, work)})
    if found:
        return LIMITS[max(found, key=limits.count)]
    return "work" if work in limits else None
