"""Parses service levels as an operator types them: `ttft=0.5s itl=50`; without a unit, in ms."""

from stepscope.engine.protocol.settings.engine_config import MAX_LEVEL_MS
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.settings.setting_values import in_milliseconds

EXAMPLE = "ttft=500 itl=50"


def parse_levels(text: str, now: SLO) -> SLO:
    """Parse levels; one that is not named stays as `now`. ValueError says what to write."""
    found: dict[str, float] = {}
    for word in text.lower().split():
        name, _, value = word.partition("=")
        milliseconds = in_milliseconds(value)
        is_level = milliseconds is not None and milliseconds <= MAX_LEVEL_MS
        if name not in ("ttft", "itl") or milliseconds is None or not is_level:
            raise ValueError(f"{word!r}: write {EXAMPLE}, above 0 and in ms, or ttft=0.5s")
        found[f"{name}_ms"] = milliseconds
    if not found:
        raise ValueError(f"write {EXAMPLE}, in ms, or ttft=0.5s")
    return now._replace(**found)


def said(slo: SLO) -> str:
    return f"TTFT within {slo.ttft_ms:,g} ms, ITL within {slo.itl_ms:,g} ms"
