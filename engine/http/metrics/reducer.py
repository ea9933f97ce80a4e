"""`EngineMetrics`: what the engine's telemetry says, as meters and current values. No other input.

Times are the engine's own, from its step records. So they do not include delays by a scrape, a slow
client or this process. If a request was first seen after it had started, only what was seen counts.
"""

from dataclasses import dataclass

from stepscope.engine.http.metrics.goodput import GoodputRate
from stepscope.engine.http.metrics.meters import Meters
from stepscope.engine.protocol.pause_trail import PauseTrail
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
    """The engine's metrics.

    Args:
        ttft_s, itl_s: service levels for goodput, in seconds.
    """

    def __init__(self, ttft_s: float = 0.5, itl_s: float = 0.05) -> None:
        self.ttft_s, self.itl_s = ttft_s, itl_s
        self.meters = Meters()
        self.goodput = GoodputRate()
        self.info: EngineInfo | None = None
        self.knobs: dict[str, KnobValue] = {}
        self.num_running = 0
        self.num_waiting = 0
        self.waiting_reasons: dict[str, int] = {}
        self.kv: KVCounts | None = None
        self.token_budget: int | None = None
        self.max_num_seqs: int | None = None
        self._lives: dict[int, _Life] = {}
        self._pauses = PauseTrail()
        self._now_ns: int | None = None  # of the last message, on the engine's clock

    def join(self, snapshot: Snapshot) -> None:
        """Take over an engine's current state and unfinished requests from its snapshot."""
        self._set_info(snapshot.info)
        self.knobs = dict(snapshot.knobs)
        self.num_running = snapshot.num_running or 0
        self.num_waiting = snapshot.num_waiting or 0
        self.waiting_reasons = snapshot.waiting_reasons or {}
        self.kv = snapshot.kv
        self._pauses, self._now_ns = PauseTrail.of(snapshot), snapshot.time_ns
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
        self.meters.count("stepscope_telemetry_lost", num_messages)
        self._lives.clear()
        self.goodput.restart()

    def leave(self) -> None:
        """Clear the current values and requests, because the engine is gone."""
        self._lives.clear()
        self._pauses, self._now_ns = PauseTrail(), None
        self.goodput.restart()
        self.num_running = self.num_waiting = 0
        self.waiting_reasons = {}
        self.kv = None

    def apply(self, message: Telemetry) -> None:
        if isinstance(message, StepRecord):
            self._go_on(message, message.tokens_ns)
            self._apply_step(message)
        elif isinstance(message, EngineStatus):
            self._go_on(message, message.time_ns)
            self.num_running = message.num_running
            self.num_waiting = message.num_waiting
            self._count_blocks(message.kv)
            self._apply_events(message.events, message.time_ns)
        elif isinstance(message, EngineInfo):
            self._set_info(message)
        elif isinstance(message, KnobsChanged):
            self.knobs.update(message.new)

    def _go_on(self, message: StepRecord | EngineStatus, now_ns: int) -> None:
        """Go on to the time of a message, and count the operator's pauses up to it."""
        was_on = self._pauses.is_on
        self._pauses = self._pauses.after(message)
        self.meters.count("stepscope_pauses", self._pauses.is_on and not was_on)
        before_ns = self._now_ns or now_ns
        self._now_ns = now_ns = max(before_ns, now_ns)
        self.meters.count("stepscope_paused_seconds", self._pauses.within(before_ns, now_ns) / 1e9)
        self.goodput.advance(now_ns)

    def _apply_step(self, step: StepRecord) -> None:
        meters = self.meters
        self.num_running = step.num_running
        self.num_waiting = step.num_waiting
        self.waiting_reasons = step.waiting_reasons or {}
        self.token_budget = step.token_budget
        self.max_num_seqs = step.max_num_seqs
        meters.count("stepscope_steps")
        meters.scheduled_tokens.labels("prefill").inc(step.num_prefill_tokens)
        meters.scheduled_tokens.labels("decode").inc(step.num_decode_tokens)
        meters.observe(
            "vllm:iteration_tokens_total", step.num_prefill_tokens + step.num_decode_tokens
        )
        meters.observe("stepscope_step_seconds", (step.tokens_ns - step.schedule_start_ns) / 1e9)
        scheduled_ns = step.schedule_start_ns
        if step.schedule_end_ns is not None:
            scheduled_ns = step.schedule_end_ns
            meters.observe(
                "stepscope_schedule_seconds", (scheduled_ns - step.schedule_start_ns) / 1e9
            )
        self._count_blocks(step.kv)
        self._apply_arrivals(step.events)
        num_tokens = sum(
            self._apply_row(row, scheduled_ns, step.tokens_ns) for row in step.batch or ()
        )
        meters.count("vllm:generation_tokens", num_tokens)
        self._apply_events(step.events, step.tokens_ns, arrivals=False)

    def _apply_row(self, row: BatchRow, scheduled_ns: int, tokens_ns: int) -> int:
        """Apply a row of a step. Returns how many tokens its request got."""
        samples = row.flags & _LAST_CHUNK
        num_tokens = (row.num_tokens if row.phase == _DECODE else 1) if samples else 0
        life = self._lives.get(row.request_id)
        if life is None:
            return num_tokens
        if not life.was_scheduled:
            life.was_scheduled = True
            life.scheduled_ns = scheduled_ns
            life.num_cached_tokens = row.num_hit_tokens
        if not samples:
            return num_tokens
        if row.flags & _FIRST_TOKEN:
            life.first_token_ns = tokens_ns
            self.meters.count("vllm:prompt_tokens", life.num_prompt_tokens)
            self.meters.count("vllm:prompt_tokens_cached", life.num_cached_tokens)
            ttft_s = self._seconds(life.arrival_ns, tokens_ns)
            life.has_kept_levels = ttft_s <= self.ttft_s
            self.meters.observe("vllm:time_to_first_token_seconds", ttft_s)
        elif life.last_token_ns is not None:
            itl_s = self._seconds(life.last_token_ns, tokens_ns)
            if itl_s > self.itl_s:
                life.has_kept_levels = False
            self.meters.observe("vllm:inter_token_latency_seconds", itl_s)
        life.last_token_ns = tokens_ns
        return num_tokens

    def _apply_arrivals(self, events: list[RequestEvent]) -> None:
        for event in events:
            if isinstance(event, Arrived):
                life = self._lives[event.request_id] = _Life(
                    event.time_ns, event.num_prompt_tokens, event.max_tokens
                )
                if (origin := event.origin) is not None:
                    life.first_token_ns = origin.first_token_ns
                    life.last_token_ns = origin.last_token_ns
                    ttft_s = self._seconds(event.time_ns, origin.first_token_ns)
                    life.has_kept_levels = ttft_s <= self.ttft_s

    def _apply_events(
        self, events: list[RequestEvent], time_ns: int, *, arrivals: bool = True
    ) -> None:
        if arrivals:
            self._apply_arrivals(events)
        for event in events:
            if isinstance(event, Preempted):
                self.meters.count("vllm:num_preemptions")
                if (life := self._lives.get(event.request_id)) is not None:
                    life.num_preemptions += 1
            elif isinstance(event, Finished):
                self.meters.finished.labels(event.reason).inc()
                life = self._lives.pop(event.request_id, None)
                if life is not None and event.handed_to is None:
                    self._finish(life, event.num_output_tokens, time_ns)
            elif isinstance(event, Aborted):
                self.meters.finished.labels("abort").inc()
                self._lives.pop(event.request_id, None)
            elif isinstance(event, Rejected):
                self.meters.count("stepscope_requests_rejected")

    def _finish(self, life: _Life, num_output_tokens: int, time_ns: int) -> None:
        meters = self.meters
        meters.observe("vllm:request_prompt_tokens", life.num_prompt_tokens)
        meters.observe(
            "vllm:request_prefill_kv_computed_tokens",
            life.num_prompt_tokens - life.num_cached_tokens,
        )
        meters.observe("vllm:request_generation_tokens", num_output_tokens)
        meters.observe("vllm:request_params_max_tokens", life.max_tokens)
        meters.observe("vllm:request_num_preemptions", life.num_preemptions)
        meters.observe("vllm:e2e_request_latency_seconds", self._seconds(life.arrival_ns, time_ns))
        if life.first_token_ns is None or life.last_token_ns is None:
            return
        if life.has_kept_levels:
            meters.count("stepscope_requests_within_levels")
            self.goodput.add(time_ns)
        decode_s = self._seconds(life.first_token_ns, life.last_token_ns)
        meters.observe("vllm:request_decode_time_seconds", decode_s)
        num_gaps = num_output_tokens - 1
        meters.observe(
            "vllm:request_time_per_output_token_seconds",
            decode_s / num_gaps if num_gaps > 0 else 0.0,
        )
        if life.scheduled_ns is None:
            return
        meters.observe(
            "vllm:request_queue_time_seconds", self._seconds(life.arrival_ns, life.scheduled_ns)
        )
        meters.observe(
            "vllm:request_prefill_time_seconds",
            self._seconds(life.scheduled_ns, life.first_token_ns),
        )
        meters.observe(
            "vllm:request_inference_time_seconds",
            self._seconds(life.scheduled_ns, life.last_token_ns),
        )

    def _seconds(self, start_ns: int, end_ns: int) -> float:
        """Seconds between two times, without the operator's pauses."""
        return (end_ns - start_ns - self._pauses.within(start_ns, end_ns)) / 1e9

    def _count_blocks(self, kv: KVCounts | None) -> None:
        self.kv = kv
        if kv is not None:
            self.meters.count("vllm:prefix_cache_queries", kv.queried_tokens)
            self.meters.count("vllm:prefix_cache_hits", kv.hit_tokens)
            self.meters.count("stepscope_kv_blocks_evicted", kv.evicted)

    def _set_info(self, info: EngineInfo) -> None:
        if self.info is None or self.info.max_model_len != info.max_model_len:
            self.meters.size(info.max_model_len)
        self.info = info
