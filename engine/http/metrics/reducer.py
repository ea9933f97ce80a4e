"""`EngineMetrics`: computes counters and histograms from the engine's telemetry. No other input.

Times are the engine's own, from its step records. So they do not include delays by a scrape, a slow
client or this process. If a request was first seen after it had started, only what was seen counts.
"""

from dataclasses import dataclass

from stepscope.engine.http.metrics.goodput import GoodputRate
from stepscope.engine.http.metrics.histogram import (
    FIRST_TOKEN_SECONDS,
    PREEMPTIONS,
    REQUEST_SECONDS,
    STEP_SECONDS,
    STEP_TOKENS,
    TOKEN_SECONDS,
    Histogram,
    request_tokens,
)
from stepscope.engine.protocol.wire import (
    Aborted,
    Arrived,
    BatchRow,
    EngineInfo,
    EngineStatus,
    Finished,
    KnobsChanged,
    KnobValue,
    KVCounts,
    Phase,
    Preempted,
    Rejected,
    RequestEvent,
    RowFlag,
    Snapshot,
    StepRecord,
    Telemetry,
)

_LAST_CHUNK = int(RowFlag.LAST_CHUNK)
_FIRST_TOKEN = int(RowFlag.FIRST_TOKEN)
_DECODE = int(Phase.DECODE)
_DEFAULT_LENGTH = 1_048_576


@dataclass(slots=True)
class _Life:
    """What is known of one unfinished request.

    Times are engine nanoseconds, None if not known (yet).
    """

    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    scheduled_ns: int | None = None
    was_scheduled: bool = False
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    has_kept_levels: bool = True


class EngineMetrics:
    """The engine's metrics. Totals count from the start of this process, across engine restarts.

    Args:
        ttft_s, itl_s: service levels for goodput, in seconds.
    """

    def __init__(self, ttft_s: float = 0.5, itl_s: float = 0.05) -> None:
        self.ttft_s, self.itl_s = ttft_s, itl_s
        self.info: EngineInfo | None = None
        self.knobs: dict[str, KnobValue] = {}
        # Current values
        self.num_running = 0
        self.num_waiting = 0
        self.waiting_reasons: dict[str, int] = {}
        self.kv: KVCounts | None = None
        self.token_budget: int | None = None
        self.max_num_seqs: int | None = None
        self.num_dropped = 0
        self.goodput = GoodputRate()
        # Totals
        self.num_steps = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.scheduled_prefill_tokens = 0
        self.scheduled_decode_tokens = 0
        self.num_preemptions = 0
        self.num_rejected = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_evicted_blocks = 0
        self.num_kept_levels = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self.num_lost_messages = 0
        self.num_healed_messages = 0
        # Distributions
        self.step_seconds = Histogram(STEP_SECONDS)
        self.schedule_seconds = Histogram(STEP_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.first_token_seconds = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_seconds = Histogram(TOKEN_SECONDS)
        self.output_token_seconds = Histogram(TOKEN_SECONDS)
        self.e2e_seconds = Histogram(REQUEST_SECONDS)
        self.queue_seconds = Histogram(REQUEST_SECONDS)
        self.inference_seconds = Histogram(REQUEST_SECONDS)
        self.prefill_seconds = Histogram(REQUEST_SECONDS)
        self.decode_seconds = Histogram(REQUEST_SECONDS)
        self.request_preemptions = Histogram(PREEMPTIONS)
        self._size_histograms(_DEFAULT_LENGTH)
        self._lives: dict[int, _Life] = {}

    def join(self, snapshot: Snapshot) -> None:
        """Take over an engine's current state and unfinished requests from its snapshot."""
        self._set_info(snapshot.info)
        self.knobs = dict(snapshot.knobs)
        self.num_running = snapshot.num_running or 0
        self.num_waiting = snapshot.num_waiting or 0
        self.waiting_reasons = snapshot.waiting_reasons or {}
        self.kv = snapshot.kv
        self._lives = {
            view.request_id: _Life(
                arrival_ns=view.arrival_ns,
                num_prompt_tokens=view.num_prompt_tokens,
                max_tokens=view.max_tokens,
                was_scheduled=bool(view.num_computed_tokens or view.num_output_tokens),
                first_token_ns=view.first_token_ns,
                last_token_ns=view.last_token_ns,
                num_cached_tokens=view.num_cached_tokens,
                num_preemptions=view.num_preemptions,
                has_kept_levels=view.first_token_ns is None,  # else earlier latencies are unknown
            )
            for view in snapshot.requests
        }

    def lose(self, num_messages: int) -> None:
        """Count `num_messages` lost messages, and forget the unfinished requests.

        They may have received tokens or ended in the lost messages, so their latencies would be
        wrong. From here on, only their tokens and ends count.
        """
        self.num_lost_messages += num_messages
        self._lives.clear()
        self.goodput.restart()

    def leave(self) -> None:
        """Clear the current values and requests, because the engine is gone."""
        self._lives.clear()
        self.goodput.restart()
        self.num_running = self.num_waiting = 0
        self.waiting_reasons = {}
        self.kv = None

    def apply(self, message: Telemetry) -> None:
        if isinstance(message, StepRecord):
            self._apply_step(message)
        elif isinstance(message, EngineStatus):
            self.num_running = message.num_running
            self.num_waiting = message.num_waiting
            self.num_dropped = message.num_dropped
            self._count_blocks(message.kv)
            self.goodput.advance(message.time_ns)
            self._apply_events(message.events, message.time_ns)
        elif isinstance(message, EngineInfo):
            self._set_info(message)
        elif isinstance(message, KnobsChanged):
            self.knobs.update(message.new)

    def _apply_step(self, step: StepRecord) -> None:
        self.num_steps += 1
        self.num_running = step.num_running
        self.num_waiting = step.num_waiting
        self.waiting_reasons = step.waiting_reasons or {}
        self.token_budget = step.token_budget
        self.max_num_seqs = step.max_num_seqs
        self.num_dropped = step.num_dropped
        self.scheduled_prefill_tokens += step.num_prefill_tokens
        self.scheduled_decode_tokens += step.num_decode_tokens
        self.step_tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self.step_seconds.observe((step.tokens_ns - step.schedule_start_ns) / 1e9)
        scheduled_ns = step.schedule_start_ns
        if step.schedule_end_ns is not None:
            scheduled_ns = step.schedule_end_ns
            self.schedule_seconds.observe((scheduled_ns - step.schedule_start_ns) / 1e9)
        self._count_blocks(step.kv)
        self.goodput.advance(step.tokens_ns)
        self._apply_arrivals(step.events)
        for row in step.batch or ():
            self._apply_row(row, scheduled_ns, step.tokens_ns)
        self._apply_events(step.events, step.tokens_ns, arrivals=False)

    def _apply_row(self, row: BatchRow, scheduled_ns: int, tokens_ns: int) -> None:
        samples = row.flags & _LAST_CHUNK
        if samples:
            self.generation_tokens += row.num_tokens if row.phase == _DECODE else 1
        life = self._lives.get(row.request_id)
        if life is None:
            return
        if not life.was_scheduled:
            life.was_scheduled = True
            life.scheduled_ns = scheduled_ns
            life.num_cached_tokens = row.num_hit_tokens
        if not samples:
            return
        if row.flags & _FIRST_TOKEN:
            life.first_token_ns = tokens_ns
            self.prompt_tokens += life.num_prompt_tokens
            self.cached_prompt_tokens += life.num_cached_tokens
            ttft_s = (tokens_ns - life.arrival_ns) / 1e9
            life.has_kept_levels = ttft_s <= self.ttft_s
            self.first_token_seconds.observe(ttft_s)
        elif life.last_token_ns is not None:
            itl_s = (tokens_ns - life.last_token_ns) / 1e9
            if itl_s > self.itl_s:
                life.has_kept_levels = False
            self.inter_token_seconds.observe(itl_s)
        life.last_token_ns = tokens_ns

    def _apply_arrivals(self, events: list[RequestEvent]) -> None:
        for event in events:
            if isinstance(event, Arrived):
                life = self._lives[event.request_id] = _Life(
                    event.time_ns, event.num_prompt_tokens, event.max_tokens
                )
                if (origin := event.origin) is not None:
                    life.first_token_ns = origin.first_token_ns
                    life.last_token_ns = origin.last_token_ns
                    ttft_s = (origin.first_token_ns - event.time_ns) / 1e9
                    life.has_kept_levels = ttft_s <= self.ttft_s

    def _apply_events(
        self, events: list[RequestEvent], time_ns: int, *, arrivals: bool = True
    ) -> None:
        if arrivals:
            self._apply_arrivals(events)
        for event in events:
            if isinstance(event, Preempted):
                self.num_preemptions += 1
                if (life := self._lives.get(event.request_id)) is not None:
                    life.num_preemptions += 1
            elif isinstance(event, Finished):
                self.finished[event.reason] = self.finished.get(event.reason, 0) + 1
                life = self._lives.pop(event.request_id, None)
                if life is not None and event.handed_to is None:
                    self._finish(life, event.num_output_tokens, time_ns)
            elif isinstance(event, Aborted):
                self.finished["abort"] += 1
                self._lives.pop(event.request_id, None)
            elif isinstance(event, Rejected):
                self.num_rejected += 1

    def _finish(self, life: _Life, num_output_tokens: int, time_ns: int) -> None:
        self.request_prompt_tokens.observe(life.num_prompt_tokens)
        self.request_computed_tokens.observe(life.num_prompt_tokens - life.num_cached_tokens)
        self.request_generation_tokens.observe(num_output_tokens)
        self.request_max_tokens.observe(life.max_tokens)
        self.request_preemptions.observe(life.num_preemptions)
        self.e2e_seconds.observe((time_ns - life.arrival_ns) / 1e9)
        if life.first_token_ns is None or life.last_token_ns is None:
            return
        if life.has_kept_levels:
            self.num_kept_levels += 1
            self.goodput.add(time_ns)
        decode_s = (life.last_token_ns - life.first_token_ns) / 1e9
        self.decode_seconds.observe(decode_s)
        num_gaps = num_output_tokens - 1
        self.output_token_seconds.observe(decode_s / num_gaps if num_gaps > 0 else 0.0)
        if life.scheduled_ns is None:
            return
        self.queue_seconds.observe((life.scheduled_ns - life.arrival_ns) / 1e9)
        self.prefill_seconds.observe((life.first_token_ns - life.scheduled_ns) / 1e9)
        self.inference_seconds.observe((life.last_token_ns - life.scheduled_ns) / 1e9)

    def _count_blocks(self, kv: KVCounts | None) -> None:
        self.kv = kv
        if kv is not None:
            self.prefix_queries += kv.queried_tokens
            self.prefix_hits += kv.hit_tokens
            self.num_evicted_blocks += kv.evicted

    def _set_info(self, info: EngineInfo) -> None:
        known = self.info
        if known is None or known.max_model_len != info.max_model_len:
            self._size_histograms(info.max_model_len or _DEFAULT_LENGTH)
        self.info = info

    def _size_histograms(self, max_model_len: int) -> None:
        bounds = request_tokens(max_model_len)
        self.request_prompt_tokens = Histogram(bounds)
        self.request_computed_tokens = Histogram(bounds)
        self.request_generation_tokens = Histogram(bounds)
        self.request_max_tokens = Histogram(bounds)
