"""The service levels and alert rules by which a command judges, and what limited the steps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.engine.protocol.wire import EngineInfo
from stepscope.recordings.compare.advice import Run, advice
from stepscope.recordings.file import service_levels
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, levels_said, levels_text
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.limits import LIMIT_SPECS, LIMITS, Limit
from stepscope.tui.cli.shared.output import note
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import resolve, settled
from stepscope.tui.settings.settings import DashboardSettings, from_environment, load_alerts

if TYPE_CHECKING:
    from stepscope.recordings.alerts.rule import Rule


def chosen_levels(flags: Mapping[str, Any]) -> Levels:
    """Return the service levels that an option, a variable or the config file sets; no defaults."""
    return own_levels(resolve(DashboardSettings, "dashboard", flags))


def level_of(flags: Mapping[str, Any], recording: Recording) -> SLO:
    """Return the service levels by which to judge a recording, and say if they are not its own."""
    said = levels_said(recording.info, recording.metadata)
    return note_own(chosen_for(flags, recording), said)


def level_of_engine(flags: Mapping[str, Any], info: EngineInfo) -> SLO:
    """Return the service levels by which to judge an engine, and say if they are not its own."""
    return note_own(chosen_levels(flags), levels_said(info))


def level_origins(
    flags: Mapping[str, Any], recording: Recording, *, is_file: bool = True
) -> dict[str, str]:
    """Return where each service level by which a recording is judged comes from, by its name.

    `is_file`: false if it was made of an engine, just to be read.
    """
    chosen = settled(DashboardSettings, "dashboard", flags)
    own = chosen_for(flags, recording) if is_file else chosen_levels(flags)
    said = levels_said(recording.info, recording.metadata if is_file else None)
    says = f"as the {'recording' if is_file else 'engine'} says"
    return {
        name: chosen[name].origin if name in own else says if name in said else "the default"
        for name in service_levels.LEVEL_NAMES
    }


def note_others(
    flags: Mapping[str, Any], file: str, recording: Recording, judged: Levels, of: str
) -> None:
    """Say on stderr if a recording is not judged by its own levels, but by those of another."""
    own = chosen_for(flags, recording)
    said = levels_said(recording.info, recording.metadata)
    if others := {n: ms for n, ms in said.items() if judged.get(n) not in (ms, own.get(n, ms))}:
        note(
            f"{file} carries other service levels, {levels_text(others)}; both are judged by "
            f"those of {of} (--slo-ttft and --slo-itl set others)"
        )


def note_own(chosen: Levels, said: Levels) -> SLO:
    """Return the levels to judge by; say on stderr if the viewer's override what was said."""
    if text := service_levels.own_text(chosen, said):
        note(f"{levels_text(chosen)}, {text}", "service levels: ")
    return service_levels.slo_of(chosen, said)


def own_levels(settings: DashboardSettings) -> Levels:
    """Return the service levels that the settings choose; those not chosen are missing."""
    found = {name: getattr(settings, name) for name in service_levels.LEVEL_NAMES}
    return {name: ms for name, ms in found.items() if ms is not None}


def chosen_for(flags: Mapping[str, Any], recording: Recording) -> Levels:
    """Return the levels that the viewer chose and that come before those of a recording."""
    settings = resolve(DashboardSettings, "dashboard", flags)
    return own_levels(judged_as(settings, flags, recording))


def judged_as(
    settings: DashboardSettings, flags: Mapping[str, Any], recording: Recording
) -> DashboardSettings:
    """Return the settings, without the config file's levels that the recording has itself."""
    none = {
        name: None
        for name in service_levels.levels_in(recording.metadata)
        if name not in flags and from_environment("dashboard", name) is None
    }
    return msgspec.structs.replace(settings, **none)


def chosen_rules(when: Sequence[str]) -> "tuple[Rule, ...]":
    """Return the alert rules of `--when`, else those of the config file."""
    from stepscope.recordings.alerts.rule import parse_rule  # loads every figure
    from stepscope.recordings.figures import BoundError

    try:
        return tuple(parse_rule(text) for text in when) or load_alerts()
    except BoundError as error:
        raise WrongUsage(f"--when: {error}") from error


# What limited the steps

_SHOWN = 0.005  # smaller shares are left out


def limits_text(side: Run) -> str:
    """Return a line with each limit and the shares that it had, the largest first.

    A full step takes longer than others, so its share of the time in steps says more than that of
    the steps.
    """
    figures, of_time = side.figures(), _shares_of_time(side)
    of_steps = {limit: figures[f"limit_{limit}"] or 0.0 for limit in LIMITS}
    shares = of_time or of_steps
    parts: list[str] = []
    for limit in sorted(LIMITS, key=shares.__getitem__, reverse=True):
        if max(of_steps[limit], shares[limit]) >= _SHOWN:
            unit = "" if parts else " of the time in steps" if of_time else " of steps"
            text = f"{LIMIT_SPECS[limit].words} {shares[limit]:.0%}{unit}"
            unit = "" if parts else " of steps"
            parts.append(text + (f" ({of_steps[limit]:.0%}{unit})" if of_time else ""))
    return ", ".join(parts) or "unknown"


def _shares_of_time(side: Run) -> dict[Limit, float]:
    """For each limit, the share that its steps had of the time in steps; empty if unknown."""
    spent = {limit: each.busy_ns for limit, each in side.limited.items()}
    known = {limit: ns for limit, ns in spent.items() if ns is not None}
    total_ns = sum(known.values())
    if not total_ns or len(known) < len(spent):
        return {}
    return dict.fromkeys(LIMITS, 0.0) | {limit: ns / total_ns for limit, ns in known.items()}


def advice_lines(side: Run) -> list[str]:
    return [f"advice: {each.text} ({each.evidence})" for each in advice(side)]


def limits_document(side: Run) -> dict[str, Any]:
    figures = side.figures()
    return {
        "limits": {limit: figures[f"limit_{limit}"] for limit in LIMITS},
        "limits_of_time": _shares_of_time(side) or None,
        "advice": [each._asdict() for each in advice(side)],
    }
