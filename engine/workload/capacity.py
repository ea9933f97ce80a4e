"""Describes an engine's measured step times in words."""

from stepscope.engine.protocol.wire import StepCosts


def in_words(costs: StepCosts) -> str:
    """Describe the step times in `costs` in a line, for people who wonder how fast it is."""
    return (
        f"decode of {costs.num_streams} streams {_ms(costs.decode_ms)} a step, "
        f"prefill of {costs.num_prefill_tokens} tokens {_ms(costs.prefill_ms)}"
    )


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 10 else f"{value:,.0f} ms"
