"""What commands need to open the dashboard: a terminal, a history, settings to keep."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.recordings.file.service_levels import LEVEL_NAMES
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.history.history import MAX_BYTES, MAX_STEPS, History
from stepscope.recordings.live.recorder import Recorder
from stepscope.tui.cli.shared.levels import own_levels
from stepscope.tui.session.live_source import LiveSource, control_of
from stepscope.tui.session.tour import Tour
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.settings.settings import (
    DashboardSettings,
    config_path,
    load_actions,
    load_alerts,
)
from stepscope.tui.settings.terminal import cannot_be_drawn_on, no_terminal

_DRAWN = ("theme", "ascii", "fps", "sort", "axis")


def new_history(
    settings: DashboardSettings, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES
) -> History:
    return History(own_levels(settings), max_steps, max_bytes)


def need_terminal(otherwise: str) -> None:
    """Raise WrongUsage, which says what to do `otherwise`, if there is no terminal to draw on."""
    if (stream := no_terminal()) is not None:
        raise WrongUsage(f"the dashboard needs a terminal, and {stream} is not one; {otherwise}")
    if (why_not := cannot_be_drawn_on(os.environ)) is not None:
        raise WrongUsage(f"{why_not}; {otherwise}")


def run_live(
    source: LiveSource,
    settings: DashboardSettings,
    recorder: Recorder | None = None,
    fleet: Fleet | None = None,
    keeps_levels: bool = True,
    news: Callable[[], str | None] | None = None,
    tour: Tour | None = None,
) -> None:
    """Show a live engine until its operator leaves; `keeps_levels`: save changed service levels."""
    # Textual loads slowly: imported here, so that a wrong endpoint is reported at once.
    from stepscope.tui.app.run import run_dashboard

    run_dashboard(
        source,
        control_endpoint=control_of(source),
        recorder=recorder,
        fleet=fleet,
        news=news,
        rules=load_alerts(),
        tour=tour,
        **dashboard_options(settings, keeps_levels),
    )


def dashboard_options(settings: DashboardSettings, keeps_levels: bool = True) -> dict[str, Any]:
    """Return the arguments of `run_dashboard` that come from the settings and the config file."""
    path, log = config_path(), None
    if settings.log is not None:
        log = Path(settings.log).expanduser()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.open("ab").close()
        except OSError as error:
            raise WrongUsage(f"--log: {log} cannot be written: {error.strerror}") from error
    is_kept = settings.keep and not settings.readonly and path != Path(os.devnull)
    kept = (*_DRAWN, *(LEVEL_NAMES if keeps_levels else ()))
    began = {name: getattr(settings, name) for name in kept}
    return {
        **{name: getattr(settings, name) for name in ("readonly", *_DRAWN)},
        "actions": load_actions(),
        "preferences": Preferences(path if is_kept else None, began),
        "log_file": log,
    }
