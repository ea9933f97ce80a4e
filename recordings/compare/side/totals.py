"""`RunTotals`: sums over all steps of a run, and how they vary over time. Bounded memory."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepscope.engine.protocol.wire import FirstToken, KVCounts, StepRecord
from stepscope.recordings.figures.sums import LatencySpread, Sums, per
from stepscope.recordings.state.outcome import Outcome
from stepscope.recordings.state.series.finished import KeptLevels
from stepscope.recordings.state.series.latency import LatencyKind
from stepscope.recordings.state.series.limits import LIMITS, UNKNOWN, limit_of

NUM_SLICES = 20  # slices of a run, to estimate how much its rates vary
_FIRST_WIDTH_NS = 50_000_000
_MAX_BUCKETS = 4096


class CountOverTime:
    """A count in equal intervals of time, whose width doubles as the run grows."""

    def __init__(self) -> None:
        self.width_ns = _FIRST_WIDTH_NS
        self._sums = array("q")

    def add(self, time_ns: int, number: int) -> None:
        """Add to the interval that contains `time_ns`. Times must not go back."""
        while time_ns // self.width_ns >= _MAX_BUCKETS:
            self.width_ns *= 2
            if len(self._sums) % 2:
                self._sums.append(0)
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = array("q", (left + right for left, right in pairs))
        bucket = time_ns // self.width_ns
        if bucket >= len(self._sums):
            self._sums.extend([0] * (bucket + 1 - len(self._sums)))
        self._sums[bucket] += number

    def slices(self) -> list[float]:
        """Rates per second in up to `NUM_SLICES` equal slices; empty if the run is too short."""
        per_slice = max(1, (len(self._sums) - 1) // NUM_SLICES)
        num = min(NUM_SLICES, (len(self._sums) - 1) // per_slice)
        seconds = per_slice * self.width_ns / 1e9
        return [
            sum(self._sums[place * per_slice : (place + 1) * per_slice]) / seconds
            for place in range(num)
        ]


@dataclass(slots=True)
class LimitedSteps:
    """Sums over the steps with the same limit: tokens and blocks, used and available."""

    num_steps: int = 0
    num_spent_tokens: int = 0
    num_budget_tokens: int = 0
    num_kv_used: int = 0
    num_kv_blocks: int = 0

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        if record.token_budget:
            padded = record.num_padded_tokens or 0
            self.num_spent_tokens += record.num_prefill_tokens + record.num_decode_tokens + padded
            self.num_budget_tokens += record.token_budget
        if (kv := record.kv) is not None:
            self.num_kv_used += kv.used
            self.num_kv_blocks += kv.used + kv.cached + kv.empty

    @property
    def budget_used(self) -> float | None:
        return per(self.num_spent_tokens, self.num_budget_tokens)

    @property
    def kv_used(self) -> float | None:
        return per(self.num_kv_used, self.num_kv_blocks)


@dataclass(slots=True)
class RunTotals:
    """Sums over the steps of a run, and counts over time."""

    num_steps: int = 0
    num_steps_without_rows: int = 0
    num_mixed: int = 0
    num_in_tokens: int = 0  # of prompts: first computed, or skipped by a prefix hit
    num_out_tokens: int = 0
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    recompute_ns: int = 0  # part of `busy_ns`
    num_padded_tokens: int = 0
    num_preempted: int = 0
    num_arrived: int = 0
    num_finished: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_kv_steps: int = 0
    num_kv_used: int = 0  # summed up over steps
    num_kv_blocks: int = 0  # summed up over steps
    kv_share_peak: float = 0.0
    num_evicted: int = 0
    num_budget_tokens: int = 0  # over all steps with a budget
    num_spent_tokens: int = 0  # in these steps, padding included
    busy_ns: int = 0
    limited: list[LimitedSteps] = field(default_factory=lambda: [LimitedSteps() for _ in LIMITS])
    num_waiting_sum: int = 0
    tokens_in: CountOverTime = field(default_factory=CountOverTime)
    tokens_out: CountOverTime = field(default_factory=CountOverTime)
    preempted: CountOverTime = field(default_factory=CountOverTime)
    queried: CountOverTime = field(default_factory=CountOverTime)  # tokens looked up in the cache
    hits: CountOverTime = field(default_factory=CountOverTime)
    kept: CountOverTime = field(default_factory=CountOverTime)  # finished, all levels kept
    late: CountOverTime = field(default_factory=CountOverTime)  # finished, a level broken

    def add(self, record: StepRecord, outcome: Outcome, end_ns: int) -> None:
        """Add a step that ended `end_ns` after the run began."""
        self.num_steps += 1
        num_rows = None if record.batch is None else len(record.batch)
        if (limit := limit_of(record, outcome, num_rows)) != UNKNOWN:
            self.limited[limit].add(record)
        prefill, decode = record.num_prefill_tokens, record.num_decode_tokens
        num_out = outcome.num_output_tokens
        if record.batch is None:
            self.num_steps_without_rows += 1
            num_out = decode + sum(isinstance(event, FirstToken) for event in record.events)
        num_in = prefill - outcome.num_recomputed_tokens + outcome.num_cached_tokens
        self.num_mixed += prefill > 0 and decode > 0
        self.num_in_tokens += num_in
        self.num_out_tokens += num_out
        self.num_prefill_tokens += prefill
        busy_ns = max(0, record.tokens_ns - record.schedule_start_ns)
        if (again := outcome.num_recomputed_tokens) and prefill + decode:
            self.num_recomputed_tokens += again
            self.recompute_ns += again * busy_ns // (prefill + decode)
        self.num_padded_tokens += record.num_padded_tokens or 0
        self.num_preempted += outcome.num_preempted
        self.num_arrived += outcome.num_arrived
        self.num_finished += outcome.num_finished
        self.busy_ns += busy_ns
        self.num_waiting_sum += record.num_waiting
        self.tokens_in.add(end_ns, num_in)
        self.tokens_out.add(end_ns, num_out)
        self.preempted.add(end_ns, outcome.num_preempted)
        if record.token_budget:
            self.num_budget_tokens += record.token_budget
            self.num_spent_tokens += prefill + decode + (record.num_padded_tokens or 0)
        if record.kv is not None:
            self._add_kv(record.kv)
        self.num_queried_tokens += (num_queried := outcome.num_queried_tokens or 0)
        self.num_hit_tokens += (num_hit := outcome.num_hit_tokens or 0)
        self.queried.add(end_ns, num_queried)
        self.hits.add(end_ns, num_hit)

    def _add_kv(self, kv: KVCounts) -> None:
        num_blocks = kv.used + kv.cached + kv.empty
        if num_blocks:
            self.num_kv_steps += 1
            self.num_kv_used += kv.used
            self.num_kv_blocks += num_blocks
            self.kv_share_peak = max(self.kv_share_peak, kv.used / num_blocks)
        self.num_evicted += kv.evicted

    def sums(
        self, seconds: float, latencies: Mapping[LatencyKind, LatencySpread], kept: KeptLevels
    ) -> Sums:
        """The sums from which the figures of the run are computed."""
        has_rows, has_kv = not self.num_steps_without_rows, self.num_kv_steps > 0
        return Sums(
            seconds=seconds,
            num_steps=self.num_steps,
            latencies=latencies,
            kept=kept,
            num_finished=self.num_finished,
            num_arrived=self.num_arrived,
            num_in_tokens=self.num_in_tokens,
            num_out_tokens=self.num_out_tokens,
            num_queried_tokens=self.num_queried_tokens,
            num_hit_tokens=self.num_hit_tokens,
            num_preempted=self.num_preempted,
            num_prefill_tokens=self.num_prefill_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens if has_rows else None,
            recompute_ns=self.recompute_ns if has_rows else None,
            num_evicted=self.num_evicted if has_kv else None,
            num_waiting=self.num_waiting_sum,
            num_kv_used=self.num_kv_used,
            num_kv_blocks=self.num_kv_blocks,
            kv_peak=self.kv_share_peak if has_kv else None,
            num_budget_tokens=self.num_budget_tokens,
            num_spent_tokens=self.num_spent_tokens,
            num_mixed=self.num_mixed,
            num_limited=[each.num_steps for each in self.limited],
            busy_ns=self.busy_ns,
        )
