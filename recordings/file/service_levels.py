"""The service levels (bounds of TTFT and ITL) stored in a recording when it was made or watched.

They are in the file's metadata, under the names of the dashboard's settings. A file may have both
levels, one or none. Each takes a fixed number of bytes, so that it can be replaced during
recording.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

from stepscope.recordings.state.series.latency import SLO

LEVEL_NAMES = ("slo_ttft_ms", "slo_itl_ms")
_WIDTH = 24  # characters of the longest number

Levels: TypeAlias = Mapping[str, float]  # by name, in milliseconds


def levels_of(slo: SLO) -> Levels:
    return {"slo_ttft_ms": slo.ttft_ms, "slo_itl_ms": slo.itl_ms}


def slo_of(levels: Levels) -> SLO:
    """The service levels as an `SLO`, with defaults for missing ones."""
    defaults = levels_of(SLO())
    return SLO(*({**defaults, **levels}[name] for name in LEVEL_NAMES))


def as_metadata(levels: Levels) -> dict[str, str]:
    return {name: repr(float(levels[name])).ljust(_WIDTH) for name in LEVEL_NAMES if name in levels}


def levels_in(metadata: Mapping[str, str]) -> Levels:
    """The service levels in a file's metadata, without values that are not finite and above 0."""
    found: dict[str, float] = {}
    for name in LEVEL_NAMES:
        try:
            value = float(metadata.get(name, ""))
        except ValueError:
            continue
        if 0 < value < math.inf:
            found[name] = value
    return found


def levels_text(levels: Levels) -> str:
    """The service levels as shown to people: `TTFT 500 ms, ITL 50 ms`."""
    shown = {"slo_ttft_ms": "TTFT", "slo_itl_ms": "ITL"}
    return ", ".join(f"{shown[name]} {value:,g} ms" for name, value in levels.items())
