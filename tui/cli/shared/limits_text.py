"""Texts on what limited the steps of a session, and what to change."""

from stepscope.recordings.compare.side.advice import advice
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.state.series.limits import LIMITS, Limit

_NAMES: dict[Limit, str] = {
    "budget": "token budget",
    "seats": "seats",
    "kv": "KV blocks",
    "mode": "batching mode",
    "threshold": "long-prefill threshold",
    "paused": "paused by the operator",
    "work": "no setting",
    "lora": "LoRA slots",
    "grammar": "grammars being compiled",
    "remote_kv": "KV from elsewhere",
    "encoder": "encoder budget",
}
_SHOWN = 0.005  # smaller shares are left out


def limits_text(side: Side) -> str:
    """Return a line with each limit and the share of steps that it limited, the largest first."""
    figures = side.figures()
    names = dict(_NAMES)
    if any(each.evidence.startswith("prompts were prefilled whole") for each in advice(side)):
        names["work"] += ", but prompts were prefilled whole"
    shares = [(figures[f"limit_{limit}"] or 0.0, limit) for limit in LIMITS]
    parts = [
        f"{names[limit]} {share:.0%}" for share, limit in sorted(shares)[::-1] if share >= _SHOWN
    ]
    return ", ".join(parts) or "unknown"


def advice_lines(side: Side) -> list[str]:
    """Return a line for each change of knobs that the steps of a session suggest."""
    return [f"advice: {each.text} ({each.evidence})" for each in advice(side)]
