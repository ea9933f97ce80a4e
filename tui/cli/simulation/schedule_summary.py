"""Summarizes a dry run of the scheduler: latencies in steps, and in ms with a step-time model."""

from dataclasses import asdict, dataclass, field

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.engine.simulation.dry_run import ScheduleReplay, ScheduleWorkload
from stepscope.engine.simulation.step_time import StepTimeModel, shape_of

_LATENCIES = ("ttft_steps", "itl_steps", "ttft_ms", "itl_ms")


@dataclass
class Summary:
    """Counts and latencies of a run. `num_steps` counts only steps that had work."""

    num_requests: int
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_padded_tokens: int = 0
    num_budgeted_tokens: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    ttft_steps: list[int] = field(default_factory=list)
    itl_steps: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)  # empty without a model of step times
    itl_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float | None]:
        """Return name -> value of each figure; latencies as p50 and p99."""
        found = {name: value for name, value in asdict(self).items() if name not in _LATENCIES}
        for name in _LATENCIES:
            samples = sorted(getattr(self, name))
            kind, _, unit = name.partition("_")
            for rank in (50, 99):
                value = samples[_place(len(samples), rank)] if samples else None
                if value is not None or unit == "steps":
                    found[f"{kind}_p{rank}_{unit}"] = value
        return found


def summarized(
    replay: ScheduleReplay, workload: ScheduleWorkload, model: StepTimeModel | None = None
) -> Summary:
    """Run the scheduler to the end of the workload, and return a summary.

    Args:
        model: gives the time of each step; a step without work takes no time.
    """
    summary = Summary(num_requests=len(workload.requests))
    scheduler = replay.scheduler
    last_token: dict[int, int] = {}  # request -> step
    now_ms = 0.0
    began_ms: list[float] = []  # step -> when it began
    ended_ms: dict[int, float] = {}  # request -> when its last token came
    for line in replay.lines():
        began_ms.append(now_ms)
        if not replay.rows and not line.preempted:
            continue
        if model is not None:
            step = ScheduledStep(line.step, replay.rows, scheduler.num_padded_tokens)
            now_ms += model.step_time(shape_of(step)).cycle_s * 1e3
        summary.num_steps += 1
        summary.num_budgeted_tokens += scheduler.knobs.max_num_batched_tokens
        summary.num_prefill_tokens += scheduler.num_prefill_tokens
        summary.num_decode_tokens += scheduler.num_decode_tokens
        summary.num_padded_tokens += scheduler.num_padded_tokens
        summary.num_preemptions += len(line.preempted)
        summary.num_hit_tokens += sum(scheduler.admitted_now.values())
        summary.num_hit_tokens -= sum(scheduler.resumed_now.values())
        for row in replay.rows:
            number = row.request.request_id
            if row.phase is Phase.RECOMPUTE:
                known = row.request.high_water - row.start
                summary.num_recomputed_tokens += min(row.num_tokens, known)
            if not row.samples:
                continue
            if number in last_token:
                summary.itl_steps.append(line.step - last_token[number])
                if model is not None:
                    summary.itl_ms.append(now_ms - ended_ms[number])
            else:
                arrival = workload.requests[number].arrival_step
                summary.ttft_steps.append(line.step - arrival + 1)
                if model is not None:
                    summary.ttft_ms.append(now_ms - began_ms[arrival])
            last_token[number] = line.step
            ended_ms[number] = now_ms
    return summary


def table(summary: Summary) -> list[str]:
    num_tokens = summary.num_prefill_tokens + summary.num_decode_tokens
    use = num_tokens / summary.num_budgeted_tokens if summary.num_budgeted_tokens else 0.0
    rows = [
        ("requests", f"{summary.num_requests:,}"),
        ("steps", f"{summary.num_steps:,} with work"),
        (
            "tokens",
            f"{num_tokens:,}: {summary.num_prefill_tokens:,} prefill, "
            f"{summary.num_decode_tokens:,} decode",
        ),
        ("budget used", f"{use:.1%} on average"),
        ("padding", f"{summary.num_padded_tokens:,} tokens, if the engine padded its steps"),
        ("prefix hits", f"{summary.num_hit_tokens:,} tokens"),
        (
            "preemptions",
            f"{summary.num_preemptions:,}, {summary.num_recomputed_tokens:,} tokens recomputed",
        ),
        ("TTFT", _percentiles(summary.ttft_steps)),
        ("ITL", _percentiles(summary.itl_steps)),
    ]
    if summary.ttft_ms:
        rows.append(("TTFT ms", _milliseconds(summary.ttft_ms)))
        rows.append(("ITL ms", _milliseconds(summary.itl_ms)))
    return [f"{name:<12} {text}" for name, text in rows]


def _percentiles(steps: list[int]) -> str:
    """Return a text with p50, p99 and maximum; percentiles are by nearest rank."""
    if not steps:
        return "no sample"
    ordered = sorted(steps)
    p50, p99 = (ordered[_place(len(ordered), rank)] for rank in (50, 99))
    return f"p50 {p50:,}  p99 {p99:,}  max {ordered[-1]:,} steps"


def _milliseconds(samples: list[float]) -> str:
    if not samples:
        return "no sample"
    ordered = sorted(samples)
    p50, p99 = (ordered[_place(len(ordered), rank)] for rank in (50, 99))
    return f"p50 {p50:,.1f}  p99 {p99:,.1f}  max {ordered[-1]:,.1f} ms"


def _place(count: int, rank: int) -> int:
    """Return the index of percentile `rank` in `count` ordered samples, by nearest rank."""
    return -(-count * rank // 100) - 1
