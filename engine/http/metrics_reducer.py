"""`EngineMetrics`: what the engine's telemetry says, as meters and current values.

Times are the engine's own: they include no delay by a scrape, a slow client or this process. If a
request was first seen after it had started, only what was seen counts.
"""

from bisect import bisect_left
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.protocol.replies import UNSOUND_LOGITS

_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# Our own bounds, because a step of a small model takes a fraction of a millisecond.
_STEP_SECONDS = tuple(
    mantissa * 10.0**power for power in range(-4, 1) for mantissa in (1.0, 2.0, 5.0)
)
_LENGTHS = tuple(float(mantissa * 10**power) for power in range(7) for mantissa in (1, 2, 5))
_COUNTERS = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:num_preemptions": "Preemptions.",
    "vllm:prompt_tokens": "Prompt tokens of requests past prefill.",
    "vllm:prompt_tokens_cached": "Prompt tokens that came from the prefix cache.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:request_success": "Requests that ended, by reason.",
    "stepscope_requests_within_levels": "Requests that finished with their first token within the "
    "TTFT level and each next one within the ITL level.",
    "stepscope_scheduled_tokens": "Tokens computed, recomputed ones included, by phase.",
    "stepscope_steps": "Forward steps.",
    "stepscope_requests_rejected": "Requests that were turned away.",
    "stepscope_requests_unsound_logits": "Requests ended because their logits were not finite.",
    "stepscope_kv_blocks_evicted": "Cached blocks overwritten.",
    "stepscope_pauses": "Times that an operator paused the engine.",
    "stepscope_paused_seconds": "Time in which an operator had paused the engine.",
    "stepscope_telemetry_lost": "Messages of the engine that were lost: other metrics lack them.",
}
_LABELS = {"vllm:request_success": ["finished_reason"], "stepscope_scheduled_tokens": ["phase"]}
_HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", _STEP_TOKENS),
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", _FIRST_TOKEN_SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request.", _TOKEN_SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean gap of a request.", _TOKEN_SECONDS),
    "vllm:e2e_request_latency_seconds": ("Arrival to end.", _REQUEST_SECONDS),
    "vllm:request_queue_time_seconds": ("Arrival to first step.", _REQUEST_SECONDS),
    "vllm:request_inference_time_seconds": ("First step to last token.", _REQUEST_SECONDS),
    "vllm:request_prefill_time_seconds": ("First step to first token.", _REQUEST_SECONDS),
    "vllm:request_decode_time_seconds": ("First token to last token.", _REQUEST_SECONDS),
    "vllm:request_num_preemptions": ("How often a request was preempted.", _PREEMPTIONS),
    "stepscope_step_seconds": ("Schedule to tokens of a step.", _STEP_SECONDS),
    "stepscope_schedule_seconds": ("Scheduling of a step.", _STEP_SECONDS),
    "vllm:request_prompt_tokens": ("Length of a prompt.", _LENGTHS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens that were not cached.", _LENGTHS),
    "vllm:request_generation_tokens": ("Length of an output.", _LENGTHS),
    "vllm:request_params_max_tokens": ("What max_tokens requests ask for.", _LENGTHS),
}


class Meters:
    """Counts from the start of this process, across engine restarts, in `registry`.

    Names and buckets are those of vLLM 0.32 where they mean the same. Three things differ:
    `iteration_tokens_total` has the tokens that each step computed, where vLLM counts a whole
    prompt in the step that completes it; an aborted request counts only by its finish reason; and
    no latency includes an operator's pause.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._counters = {
            name: Counter(name, text, _LABELS.get(name, ()), registry=self.registry)
            for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, buckets=bounds, registry=self.registry)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        for reason in ("stop", "length", "abort"):
            self.count("vllm:request_success", 0, reason)
        for phase in ("prefill", "decode"):
            self.count("stepscope_scheduled_tokens", 0, phase)

    def count(self, name: str, number: float = 1, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(number)

    def observe(self, name: str, value: float, number: int = 1) -> None:
        """Add `number` equal values to a histogram.

        `Histogram.observe` adds one, at the same cost. There is one for each token of each step,
        which would slow down the streams on the same core.
        """
        histogram = self._histograms[name]
        histogram._sum.inc(value * number)
        histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(number)


_LAST_CHUNK = int(wire.RowFlag.LAST_CHUNK)
_FIRST_TOKEN = int(wire.RowFlag.FIRST_TOKEN)
_DECODE = int(wire.Phase.DECODE)


@dataclass(slots=True)
class _Life:
    """What is known of one unfinished request: `view`, of which the status is not kept."""

    view: wire.RequestView
    was_scheduled: bool = False
    scheduled_ns: int | None = None
    has_kept_levels: bool = True


class EngineMetrics:
    """`ttft_s`, `itl_s`: service levels for goodput, those that the engine was started with."""

    def __init__(self) -> None:
        self.ttft_s, self.itl_s = 0.5, 0.05
        self.meters = Meters()
        self.info: wire.EngineInfo | None = None
        self.knobs: dict[str, wire.KnobValue] = {}
        # The latest message, and step; None: the engine is gone.
        self.latest: wire.StepRecord | wire.EngineStatus | wire.Snapshot | None = None
        self.step: wire.StepRecord | None = None
        self.waiting_reasons: dict[str, int] = {}
        self._lives: dict[int, _Life] = {}
        self._pauses = PauseTrail()
        self._now_ns: int | None = None  # of the last message, on the engine's clock

    def join(self, snapshot: wire.Snapshot) -> None:
        """Take over an engine's current state and unfinished requests from its snapshot."""
        self._set_info(snapshot.info)
        self.knobs = dict(snapshot.knobs)
        self.latest, self.waiting_reasons = snapshot, snapshot.waiting_reasons or {}
        self._pauses, self._now_ns = PauseTrail.of(snapshot), snapshot.time_ns
        self._lives = {
            view.request_id: _Life(
                view,
                was_scheduled=bool(view.num_computed_tokens or view.num_output_tokens),
                has_kept_levels=view.first_token_ns is None,  # else earlier latencies are unknown
            )
            for view in snapshot.requests
        }

    def lose(self, num_messages: int) -> None:
        """Count lost messages, and forget unfinished requests: their latencies would be wrong.

        They may have received tokens or ended meanwhile. Now only their tokens and ends count.
        """
        self.meters.count("stepscope_telemetry_lost", num_messages)
        self._lives.clear()

    def leave(self) -> None:
        """Clear the current values and requests, because the engine is gone."""
        self._lives.clear()
        self._pauses, self._now_ns = PauseTrail(), None
        self.latest = self.step = None

    def apply(self, message: wire.Telemetry) -> None:
        match message:
            case wire.StepRecord():
                self._go_on(message, message.tokens_ns)
                self._apply_step(message)
            case wire.EngineStatus():
                self._go_on(message, message.time_ns)
                self._apply_starts(message.events)
                self._apply_ends(message.events, message.time_ns)
            case wire.EngineInfo():
                self._set_info(message)
            case wire.KnobsChanged():
                self.knobs.update(message.new)

    def _go_on(self, message: wire.StepRecord | wire.EngineStatus, now_ns: int) -> None:
        count, was_on = self.meters.count, self._pauses.is_on
        self._pauses = self._pauses.after(message)
        count("stepscope_pauses", self._pauses.is_on and not was_on)
        before_ns = self._now_ns or now_ns
        self._now_ns = now_ns = max(before_ns, now_ns)
        count("stepscope_paused_seconds", self._pauses.within(before_ns, now_ns) / 1e9)
        self.latest = message
        if (kv := message.kv) is not None:
            count("vllm:prefix_cache_queries", kv.queried_tokens)
            count("vllm:prefix_cache_hits", kv.hit_tokens)
            count("stepscope_kv_blocks_evicted", kv.evicted)

    def _apply_step(self, step: wire.StepRecord) -> None:
        count, observe = self.meters.count, self.meters.observe
        self.step, self.waiting_reasons = step, step.waiting_reasons or {}
        count("stepscope_steps")
        count("stepscope_scheduled_tokens", step.num_prefill_tokens, "prefill")
        count("stepscope_scheduled_tokens", step.num_decode_tokens, "decode")
        observe("vllm:iteration_tokens_total", step.num_prefill_tokens + step.num_decode_tokens)
        begun_ns = start_ns = step.schedule_start_ns
        observe("stepscope_step_seconds", (step.tokens_ns - start_ns) / 1e9)
        if step.schedule_end_ns is not None:
            begun_ns = step.schedule_end_ns
            observe("stepscope_schedule_seconds", (begun_ns - start_ns) / 1e9)
        self._apply_starts(step.events)
        gaps: dict[int, list[_Life]] = {}  # most requests of a step wait since the same step
        rows = step.batch or ()
        num_tokens = sum([self._apply_row(row, begun_ns, step.tokens_ns, gaps) for row in rows])
        count("vllm:generation_tokens", num_tokens)
        for since_ns, lives in gaps.items():
            itl_s = self._seconds(since_ns, step.tokens_ns)
            observe("vllm:inter_token_latency_seconds", itl_s, len(lives))
            if itl_s > self.itl_s:
                for life in lives:
                    life.has_kept_levels = False
        self._apply_ends(step.events, step.tokens_ns)

    def _apply_row(
        self, row: wire.BatchRow, scheduled_ns: int, tokens_ns: int, gaps: dict[int, list[_Life]]
    ) -> int:
        """Apply a row of a step. Returns how many tokens its request got."""
        samples = row.flags & _LAST_CHUNK
        num_tokens = (row.num_tokens if row.phase == _DECODE else 1) if samples else 0
        life = self._lives.get(row.request_id)
        if life is None:
            return num_tokens
        view = life.view
        if not life.was_scheduled:
            life.was_scheduled = True
            life.scheduled_ns = scheduled_ns
        if not samples:
            return num_tokens
        if row.flags & _FIRST_TOKEN:
            view.first_token_ns = tokens_ns
            self.meters.count("vllm:prompt_tokens", view.num_prompt_tokens)
            self.meters.count("vllm:prompt_tokens_cached", view.num_cached_tokens)
            ttft_s = self._time("vllm:time_to_first_token_seconds", view.arrival_ns, tokens_ns)
            life.has_kept_levels = ttft_s <= self.ttft_s
        elif view.last_token_ns is not None:
            gaps.setdefault(view.last_token_ns, []).append(life)
        view.last_token_ns = tokens_ns
        return num_tokens

    def _apply_starts(self, events: list[wire.RequestEvent]) -> None:
        for event in events:
            if isinstance(event, wire.Arrived):
                view = wire.RequestView(
                    request_id=event.request_id,
                    client_id=event.client_id,
                    status="waiting",
                    arrival_ns=event.time_ns,
                    num_prompt_tokens=event.num_prompt_tokens,
                    max_tokens=event.max_tokens,
                )
                life = self._lives[event.request_id] = _Life(view)
                if (origin := event.origin) is not None:
                    view.first_token_ns = origin.first_token_ns
                    view.last_token_ns = origin.last_token_ns
                    ttft_s = self._seconds(event.time_ns, origin.first_token_ns)
                    life.has_kept_levels = ttft_s <= self.ttft_s
            elif isinstance(event, wire.Admitted):
                admitted = self._lives.get(event.request_id)
                if admitted is not None and not admitted.was_scheduled:  # else it finds its own
                    admitted.view.num_cached_tokens = event.num_cached_tokens

    def _apply_ends(self, events: list[wire.RequestEvent], time_ns: int) -> None:
        count = self.meters.count
        for event in events:
            match event:
                case wire.Preempted():
                    count("vllm:num_preemptions")
                    if (life := self._lives.get(event.request_id)) is not None:
                        life.view.num_preemptions += 1
                case wire.Finished():
                    count("vllm:request_success", 1, event.reason)
                    life = self._lives.pop(event.request_id, None)
                    if life is not None and event.handed_to is None:
                        self._finish(life, event.num_output_tokens, time_ns)
                case wire.Aborted():
                    count("vllm:request_success", 1, "abort")
                    count("stepscope_requests_unsound_logits", event.reason == UNSOUND_LOGITS)
                    self._lives.pop(event.request_id, None)
                case wire.Rejected():
                    count("stepscope_requests_rejected")

    def _finish(self, life: _Life, num_output_tokens: int, time_ns: int) -> None:
        view = life.view
        for name, value in (
            ("prompt_tokens", view.num_prompt_tokens),
            ("prefill_kv_computed_tokens", view.num_prompt_tokens - view.num_cached_tokens),
            ("generation_tokens", num_output_tokens),
            ("params_max_tokens", view.max_tokens),
            ("num_preemptions", view.num_preemptions),
        ):
            self.meters.observe(f"vllm:request_{name}", value)
        self._time("vllm:e2e_request_latency_seconds", view.arrival_ns, time_ns)
        first_ns, last_ns, scheduled_ns = view.first_token_ns, view.last_token_ns, life.scheduled_ns
        if first_ns is None or last_ns is None:
            return
        self.meters.count("stepscope_requests_within_levels", life.has_kept_levels)
        decode_s = self._time("vllm:request_decode_time_seconds", first_ns, last_ns)
        gap_s = decode_s / max(1, num_output_tokens - 1)
        self.meters.observe("vllm:request_time_per_output_token_seconds", gap_s)
        if scheduled_ns is not None:
            self._time("vllm:request_queue_time_seconds", view.arrival_ns, scheduled_ns)
            self._time("vllm:request_prefill_time_seconds", scheduled_ns, first_ns)
            self._time("vllm:request_inference_time_seconds", scheduled_ns, last_ns)

    def _time(self, name: str, start_ns: int, end_ns: int) -> float:
        seconds = self._seconds(start_ns, end_ns)
        self.meters.observe(name, seconds)
        return seconds

    def _seconds(self, start_ns: int, end_ns: int) -> float:
        """Seconds between two times, without the operator's pauses."""
        return (end_ns - start_ns - self._pauses.within(start_ns, end_ns)) / 1e9

    def _set_info(self, info: wire.EngineInfo) -> None:
        self.info = info
        self.ttft_s = (info.slo_ttft_ms or 500.0) / 1000
        self.itl_s = (info.slo_itl_ms or 50.0) / 1000
