"""What an engine's steps cost, in words."""

from stepscope.engine.protocol.wire import StepCosts


def in_words(costs: StepCosts) -> str:
    """For a person who waits for the engine, or wonders why it is slow."""
    return (
        f"decode of {costs.num_streams} streams {_ms(costs.decode_ms)} a step, "
        f"prefill of {costs.num_prefill_tokens} tokens {_ms(costs.prefill_ms)}"
    )


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"
