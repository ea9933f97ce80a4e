"""`Totals`: what all steps of a run come to, and how it is spread over time. Bounded memory."""

from array import array
from dataclasses import dataclass, field

from stepscope.engine.protocol.wire import FirstToken, KVCounts, StepRecord
from stepscope.recordings.state.outcome import Outcome

NUM_SLICES = 20  # of a run, for the spread of its rates
_FIRST_WIDTH_NS = 50_000_000
_MAX_BUCKETS = 4096


class CountOverTime:
    """Something that is counted, in equal stretches of time; they double as the run goes on."""

    def __init__(self) -> None:
        self.width_ns = _FIRST_WIDTH_NS
        self._sums = array("q")

    def add(self, time_ns: int, number: int) -> None:
        """Times must not run backwards."""
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
        """So many a second in up to `NUM_SLICES` equal slices; none of a run too short for that."""
        per_slice = max(1, (len(self._sums) - 1) // NUM_SLICES)
        num = min(NUM_SLICES, (len(self._sums) - 1) // per_slice)
        seconds = per_slice * self.width_ns / 1e9
        return [
            sum(self._sums[place * per_slice : (place + 1) * per_slice]) / seconds
            for place in range(num)
        ]


@dataclass(slots=True)
class Totals:
    """Sums over steps. Those that an engine does not tell have a count of steps that did."""

    num_steps: int = 0
    num_steps_without_rows: int = 0
    num_mixed: int = 0
    num_in_tokens: int = 0  # of prompts: computed for the first time, or skipped by a prefix hit
    num_out_tokens: int = 0
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_padded_tokens: int = 0
    num_preempted: int = 0
    num_arrived: int = 0
    num_finished: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_kv_steps: int = 0
    kv_share_sum: float = 0.0
    kv_share_peak: float = 0.0
    num_evicted: int = 0
    num_budget_steps: int = 0
    budget_share_sum: float = 0.0
    busy_ns: int = 0
    num_waiting_sum: int = 0
    tokens_in: CountOverTime = field(default_factory=CountOverTime)
    tokens_out: CountOverTime = field(default_factory=CountOverTime)
    preempted: CountOverTime = field(default_factory=CountOverTime)
    queried: CountOverTime = field(default_factory=CountOverTime)  # tokens looked up in the cache
    hits: CountOverTime = field(default_factory=CountOverTime)

    def add(self, record: StepRecord, outcome: Outcome, end_ns: int) -> None:
        """A step that ended so long after the run began."""
        self.num_steps += 1
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
        self.num_recomputed_tokens += outcome.num_recomputed_tokens
        self.num_padded_tokens += record.num_padded_tokens or 0
        self.num_preempted += outcome.num_preempted
        self.num_arrived += outcome.num_arrived
        self.num_finished += outcome.num_finished
        self.busy_ns += max(0, record.tokens_ns - record.schedule_start_ns)
        self.num_waiting_sum += record.num_waiting
        self.tokens_in.add(end_ns, num_in)
        self.tokens_out.add(end_ns, num_out)
        self.preempted.add(end_ns, outcome.num_preempted)
        if record.token_budget:
            spent = prefill + decode + (record.num_padded_tokens or 0)
            self.num_budget_steps += 1
            self.budget_share_sum += spent / record.token_budget
        if record.kv is not None:
            self._add_kv(record.kv, end_ns)

    def _add_kv(self, kv: KVCounts, end_ns: int) -> None:
        num_blocks = kv.used + kv.cached + kv.empty
        if num_blocks:
            share = kv.used / num_blocks
            self.num_kv_steps += 1
            self.kv_share_sum += share
            self.kv_share_peak = max(self.kv_share_peak, share)
        self.num_evicted += kv.evicted
        self.num_queried_tokens += kv.queried_tokens
        self.num_hit_tokens += kv.hit_tokens
        self.queried.add(end_ns, kv.queried_tokens)
        self.hits.add(end_ns, kv.hit_tokens)
