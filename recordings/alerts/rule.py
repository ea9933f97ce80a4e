"""`Rule`: an alert rule as people write it, such as `itl_p99 > 50ms for 30s`."""

import re
from typing import NamedTuple

from stepscope.recordings import figures
from stepscope.recordings.attribution.causes import QUEUE_REASONS
from stepscope.recordings.figures import FigureBound, FigureSpec

# Reasons in `StepRecord.waiting_reasons` whose requests are counted; those behind one that lacks
# blocks or encoder budget count with it. The last is in no `waiting_reasons`, but in `HeldRow`.
WAITING_FOR = (
    "seats", "budget", "kv_blocks", "cadence",
    "encoder", "lora", "grammar", "remote_kv", "priority",
)  # fmt: skip

# Figures of the present moment, besides those of a window.
OF_NOW: dict[str, FigureSpec] = {
    spec.name: spec
    for spec in (
        FigureSpec("step_in_flight", "step in flight", "s", "lower",
                   "how long the step under way has taken; 0 for one of ordinary length"),
        FigureSpec("queue_age", "oldest in the queue", "s", "lower",
                   "how long the oldest of the requests that were never admitted has waited"),
        FigureSpec("stalled_streams", "stalled streams", "", "lower",
                   "requests that have waited longer for their next token than the level allows"),
        *(
            FigureSpec(f"waiting_{reason}", f"waiting: {reason}", "", "lower",
                       f"requests that wait {QUEUE_REASONS[reason]}")
            for reason in WAITING_FOR
        ),
        FigureSpec("waiting_blocks", "blocks of waiting", "", "lower",
                   "KV blocks that waiting requests hold"),
        FigureSpec("silent", "silent", "s", "lower", "how long the engine gave no sign of life"),
        FigureSpec("restarts", "restarts", "", "lower",
                   "restarts of the engine in the last ten seconds"),
    )
}  # fmt: skip
KNOWN = {**figures.FIGURES, **OF_NOW}

_FOR = re.compile(r"\s*for\s+(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Rule(NamedTuple):
    """A condition, and for how long it must hold before the rule fires."""

    text: str
    bound: FigureBound
    for_s: float = 0.0

    @property
    def figure(self) -> str:
        return self.bound.figure.name

    def said(self, value: float | None) -> str:
        """Return the text of the rule with a measured value, such as `itl_p99 > 50ms: 63 ms`."""
        return f"{self.text}: {figures.value_text(self.bound.figure, value)}"


def parse_rule(text: str) -> Rule:
    """Read an alert rule: `FIGURE COMPARISON VALUE [for TIME]`.

    Raises BoundError: the text is invalid; the message tells what was expected.
    """
    bound = figures.parse_bound(text, is_whole=False, figures=KNOWN)
    rest = text[bound.end :]
    if not rest.strip():
        return Rule(text.strip(), bound)
    found = _FOR.fullmatch(rest)
    if found is None:
        raise figures.BoundError(text, f"expected 'for 30s' or nothing, got {rest.strip()!r}")
    return Rule(text.strip(), bound, float(found[1]) * _SECONDS[found[2]])
