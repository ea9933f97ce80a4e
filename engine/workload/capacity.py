"""What an engine carries of a mix, reckoned from what its steps cost."""

from stepscope.engine.protocol.wire import StepCosts
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import fit


def requests_per_s(spec: WorkloadSpec, costs: StepCosts, max_model_len: int | None) -> float:
    """Requests of the mix that the engine completes a second with `costs.num_streams` at once.

    Every request costs its prompt's share of prefill steps, and its share of the decode steps it
    shares with the other streams. That is a little too low where a larger batch is hardly slower,
    and a little too high for small chunks of long prompts, which attend to all that came before.

    Args:
        max_model_len: longer requests are cut to it; None cuts nothing.
    """
    prefill_ms = decode_ms = 0.0
    for share, num_prompt_tokens in (
        (1.0 - spec.document_share, spec.chat_tokens),
        (spec.document_share, spec.document_tokens),
    ):
        prompt, output, _ = fit(num_prompt_tokens, spec.output_tokens, max_model_len)
        prefill_ms += share * prompt * costs.prefill_ms / costs.num_prefill_tokens
        decode_ms += share * output * costs.decode_ms / costs.num_streams
    return 1000.0 / (prefill_ms + decode_ms)


def reckoned_ms(
    costs: StepCosts, num_steps: float, num_prefill_tokens: float, num_decode_tokens: float
) -> float:
    """What steps that held so much together would have taken when the engine tried some.

    A line through what it tried: so much a step, because each step reads all weights, and
    more for each prompt token and each request that decodes.
    """
    step_ms = _empty_step_ms(costs)
    return (
        num_steps * step_ms
        + num_prefill_tokens * max(0.0, costs.prefill_ms - step_ms) / costs.num_prefill_tokens
        + num_decode_tokens * max(0.0, costs.decode_ms - step_ms) / costs.num_streams
    )


def in_words(costs: StepCosts) -> str:
    """For a person who waits for the engine, or wonders why it is slow."""
    return (
        f"decode of {costs.num_streams} streams {_ms(costs.decode_ms)} a step, "
        f"prefill of {costs.num_prefill_tokens} tokens {_ms(costs.prefill_ms)}"
    )


def _empty_step_ms(costs: StepCosts) -> float:
    """Where the line through a decode of one request and of several begins."""
    if costs.stream_ms is None or costs.num_streams < 2:
        return 0.0
    # By chance the step of one took longer than that of several: then who is in it costs nothing.
    stream_ms = min(costs.stream_ms, costs.decode_ms)
    each_ms = (costs.decode_ms - stream_ms) / (costs.num_streams - 1)
    return max(0.0, stream_ms - each_ms)


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"
