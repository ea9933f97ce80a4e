"""Where service levels (bounds of TTFT and ITL) come from, and how a recording stores them.

Each level comes from the first of these that has it: what the viewer chose, the recording's
metadata (what it was watched with), the engine's own description, the default (`SLO`).

In a file's metadata they have the names of the dashboard's settings.
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.state.latency import SLO

LEVEL_NAMES = ("slo_ttft_ms", "slo_itl_ms")

Levels: TypeAlias = Mapping[str, float]  # by name, in milliseconds


def levels_of(slo: SLO) -> Levels:
    return {"slo_ttft_ms": slo.ttft_ms, "slo_itl_ms": slo.itl_ms}


def levels_said(info: EngineInfo | None, metadata: Mapping[str, str] | None = None) -> Levels:
    """The service levels that an engine or a recording of it brings."""
    of_engine = {name: repr(getattr(info, name, None)) for name in LEVEL_NAMES}
    return {**levels_in(of_engine), **levels_in(metadata or {})}


def slo_of(chosen: Levels, said: Levels | None = None) -> SLO:
    """The levels by which a viewer judges: those `chosen`, then those `said`, then the defaults."""
    levels = {**levels_of(SLO()), **(said or {}), **chosen}
    return SLO(*(levels[name] for name in LEVEL_NAMES))


def own_text(chosen: Levels, said: Levels) -> str:
    """Says that the viewer's choice differs from what the engine or recording says; else empty."""
    other = {name: ms for name, ms in said.items() if chosen.get(name, ms) != ms}
    return f"your own, not {levels_text(other)}" if other else ""


def as_metadata(levels: Levels) -> dict[str, str]:
    return {name: repr(float(levels[name])) for name in LEVEL_NAMES if name in levels}


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
