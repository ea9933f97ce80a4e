"""Service levels as an operator types them: `ttft=500 itl=50`, in milliseconds."""

from stepscope.recordings.latency import SLO
from stepscope.tui.settings import MAX_LEVEL_MS

EXAMPLE = "ttft=500 itl=50"


def parse_levels(text: str, now: SLO) -> SLO:
    """The levels that `text` means; what it does not name stays as it is `now`.

    Raises:
        ValueError: it means none; the message says what would.
    """
    found: dict[str, float] = {}
    for word in text.lower().split():
        name, _, value = word.partition("=")
        try:
            milliseconds = float(value.removesuffix("ms"))
        except ValueError:
            milliseconds = 0.0
        if name not in ("ttft", "itl") or not 0 < milliseconds <= MAX_LEVEL_MS:
            raise ValueError(f"{word!r}: write {EXAMPLE}, milliseconds above 0")
        found[f"{name}_ms"] = milliseconds
    if not found:
        raise ValueError(f"write {EXAMPLE}, in milliseconds")
    return now._replace(**found)
