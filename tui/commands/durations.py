"""Durations as they are typed: 50ms, 0.5s."""

import math
import re

from stepscope.tui.commands.errors import WrongUsage

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "": 1.0}


def milliseconds(option: str, text: str) -> float:
    """A duration such as 50ms, 0.5s or 50 (milliseconds).

    Raises:
        WrongUsage: it is none, or not above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|)", text.strip())
    value = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 0 < value < math.inf:
        raise WrongUsage(f"{option}: expected a duration such as 50ms or 0.5s, got {text!r}")
    return value
