"""Parses durations as people type them: 50ms, 0.5s."""

import math
import re

from stepscope.tui.settings.cli_errors import WrongUsage

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "": 1.0}


def in_milliseconds(text: str) -> float | None:
    """Parse a duration such as 50ms, 0.5s or 50 (ms). None if the text is no duration above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|)", text.strip())
    value = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    return value if 0 < value < math.inf else None


def milliseconds(option: str, text: str) -> float:
    """Parse the duration given to an option, in ms; raise WrongUsage if it is none above zero."""
    value = in_milliseconds(text)
    if value is None:
        raise WrongUsage(f"{option}: expected a duration such as 50ms or 0.5s, got {text!r}")
    return value
