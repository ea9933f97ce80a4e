"""Chooses the service levels by which a command judges a recording."""

from collections.abc import Mapping
from typing import Any

import msgspec

from stepscope.recordings.file.service_levels import LEVEL_NAMES, Levels
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.settings.durations import milliseconds
from stepscope.tui.settings.setting_values import resolve, settled
from stepscope.tui.settings.settings import DashboardSettings, from_environment


def level_flags(slo_itl: str | None, slo_ttft: str | None) -> dict[str, float]:
    """Return the service levels given as options, in ms, under the names of their settings.

    Raises:
        WrongUsage: an option is not a duration.
    """
    given = {}
    if slo_itl is not None:
        given["slo_itl_ms"] = milliseconds("--slo-itl", slo_itl)
    if slo_ttft is not None:
        given["slo_ttft_ms"] = milliseconds("--slo-ttft", slo_ttft)
    return given


def chosen_levels(flags: Mapping[str, Any]) -> Levels:
    """Return the service levels that an option, a variable or the config file sets; no defaults."""
    found = settled(DashboardSettings, "dashboard", flags)
    return {name: each.value for name, each in found.items() if name in LEVEL_NAMES and each.origin}


def level_of(flags: Mapping[str, Any], carried: Levels) -> SLO:
    """Return the service levels by which to judge a recording.

    Args:
        flags: levels given as options.
        carried: levels stored in the recording.
    """
    settings = judged_as(resolve(DashboardSettings, "dashboard", flags), flags, carried)
    return SLO(settings.slo_ttft_ms, settings.slo_itl_ms)


def judged_as(
    settings: DashboardSettings, flags: Mapping[str, Any], carried: Levels
) -> DashboardSettings:
    """Return the settings, with the service levels that a recording carries in place of their own.

    A level given by an option or an environment variable is kept, because it is meant for this
    command. A level of the config file is kept only if the recording does not carry one.
    """
    own = {
        name: value
        for name, value in carried.items()
        if name not in flags and from_environment("dashboard", name) is None
    }
    return msgspec.structs.replace(settings, **own)
