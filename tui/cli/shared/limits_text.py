"""Says in lines of text what limited the steps of a session, and what to change."""

from stepscope.recordings.compare.side.advice import advice
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.figures.sums import figures_of
from stepscope.recordings.state.series.limits import LIMITS, Limit

_NAMES: dict[Limit, str] = {
    "budget": "token budget",
    "seats": "seats",
    "kv": "KV blocks",
    "mode": "batching mode",
    "threshold": "long-prefill threshold",
    "paused": "paused by the operator",
    "work": "nothing",
}
_SHOWN = 0.005  # smaller shares are left out


def limits_text(side: Side) -> str:
    """Return what limited the steps, with the share of the steps each, the largest first."""
    figures = figures_of(side.sums())
    shares = [(figures[f"limit_{limit}"] or 0.0, limit) for limit in LIMITS]
    parts = [
        f"{_NAMES[limit]} {share:.0%}" for share, limit in sorted(shares)[::-1] if share >= _SHOWN
    ]
    return ", ".join(parts) or "unknown"


def advice_lines(side: Side) -> list[str]:
    """Return one line for each piece of advice that follows from the records."""
    return [f"advice: {each.text} ({each.evidence})" for each in advice(side)]
