"""Texts for an engine that publishes only totals once a second, not each step.

They tell what the totals are, what they leave out, and how to see more of the engine.
"""

from stepscope.engine.protocol.wire import StepRecord
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, facts

_MORE = {
    "vllm": (
        "to see every step: pip install stepscope in vLLM's environment, then",
        "STEPSCOPE_ENDPOINT=vllm-0 vllm serve ..., then: stepscope top vllm-0",
    ),
    "sglang": (
        "to see every step: pip install stepscope in SGLang's environment, then",
        "STEPSCOPE_ENDPOINT=sglang-0 sglang serve ..., then: stepscope top sglang-0",
    ),
    "stepscope": (
        "to see every step: stepscope top NAME,",
        "with the name or address of the engine behind this server",
    ),
}
_NO_MORE = ("stepscope sees single steps of vLLM, SGLang and its own engine only",)


def lines(frame: Frame) -> list[str]:
    """Return lines that say what totals leave out; none for an engine that publishes each step."""
    info = frame.state.info
    if info is None:
        return []
    if info.imported is not None:
        return [f"read from {info.imported}: what it does not tell is unknown"]
    if info.totals_every_s is None:
        return []
    return [
        "metrics are totals: who ran, and in which step, is unknown",
        "a column is what the counters gained in one second",
        "latencies (≈) are estimates from the buckets of histograms",
        *more(info.engine),
    ]


def more(engine: str | None) -> tuple[str, ...]:
    return _MORE.get(engine or "", _NO_MORE)


def figures(record: StepRecord) -> list[Line]:
    totals = record.totals
    if totals is None:
        return []
    load = (record.num_running, record.num_waiting) if totals.is_load_known else (None, None)
    seconds = (record.tokens_ns - record.schedule_start_ns) / 1e9
    values = {
        "seconds summed up": f"{seconds:.2f}",
        "forward steps": fmt.count(totals.num_steps),
        "requests that run": fmt.count(load[0]),
        "requests that wait": fmt.count(load[1]),
        "KV cache used": fmt.percent(totals.kv_used),
        "prompt tokens": fmt.count(totals.num_prompt_tokens),
        "tokens found in the prefix cache": fmt.count(totals.num_cached_tokens),
        "output tokens": fmt.count(totals.num_output_tokens),
        "preemptions": fmt.count(totals.num_preempted),
        "requests that finished": fmt.count(totals.num_finished),
    }
    return [facts(f" {name:<34}", f"{value:>9}") for name, value in values.items()]
