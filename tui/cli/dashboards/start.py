"""`stepscope` alone, in a terminal: the start screen, which comes back after each session."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.tui.cli.shared.process import expected, has_torch
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.settings.settings import DashboardSettings, FleetSettings, load_actions
from stepscope.tui.settings.terminal import only_ascii
from stepscope.tui.views.pages.start_page import StartChoice

if TYPE_CHECKING:
    from stepscope.tui.session.start_finder import Finder


def start() -> None:
    """Show the start screen and open what is chosen, until the operator quits it."""
    # Imported here, because 'stepscope -h' needs no Textual.
    from stepscope.tui.app.run import left_on_signals
    from stepscope.tui.screens.start import StartApp
    from stepscope.tui.settings.terminal import log_path, logged_to_file

    settings = resolve(DashboardSettings, "dashboard", {})
    configured = resolve(FleetSettings, "fleet", {}).engines
    actions = load_actions()
    is_ascii = settings.ascii
    if is_ascii is None:
        is_ascii = only_ascii(os.environ) is not None
    theme, selected, notice = settings.theme, None, None
    flags: dict[str, Any] = {}
    while True:
        app = StartApp(
            check,
            finder,
            has_torch=has_torch(),
            actions=actions,
            configured=configured,
            selected=selected,
            notice=notice,
            theme=theme,
            ascii_only=is_ascii,
        )
        with left_on_signals(app, app.close), logged_to_file(log_path()):
            selected = app.run()
        if app.return_code:
            raise SystemExit(app.return_code)
        if selected is None:
            return
        if app.skin.mode in ("dark", "light") and app.skin.mode != theme:
            theme = flags["theme"] = app.skin.mode
        if app.skin.ascii_only != is_ascii:
            is_ascii = flags["ascii"] = app.skin.ascii_only
        notice = open_choice(selected, flags)


def finder() -> "Finder":
    from stepscope.tui.session.start_finder import Finder

    return Finder(Path.cwd())


def check(choice: StartChoice) -> str | None:
    """Say in one line, within two seconds, why a choice cannot be opened; None if it can."""

    def open_it() -> None:
        if choice.kind == "engines":
            from stepscope.tui.cli.dashboards.top import engines_to_show
            from stepscope.tui.cli.shared.connect import check_any

            check_any(engines_to_show(choice.names))
        elif choice.kind == "file":
            from stepscope.recordings.file.reader import Recording
            from stepscope.tui.cli.shared.arguments import find_recording

            Recording(find_recording(choice.names[0])).close()

    return _error_of(choice, open_it)


def open_choice(choice: StartChoice, flags: Mapping[str, Any]) -> str | None:
    """Run the chosen session until the operator leaves it. Returns why it failed, if it did."""
    from stepscope.tui.cli.dashboards import demo as demo_command
    from stepscope.tui.cli.dashboards import replay as replay_command
    from stepscope.tui.cli.dashboards import top as top_command

    gpu = None if has_torch() else "h100"
    sessions = {
        "engines": lambda: top_command.top(choice.names, wait=False, flags=flags),
        "file": lambda: replay_command.replay(choice.names[0], flags=flags),
        "tour": lambda: demo_command.tour(flags=flags),
        "demo": lambda: demo_command.demo(gpu=gpu, flags=flags),
    }
    return _error_of(choice, sessions[choice.kind])


def _error_of(choice: StartChoice, work: Callable[[], object]) -> str | None:
    """Return the error of some work in one line, without the chosen file's folder, or None."""
    try:
        work()
    except KeyboardInterrupt:
        return "interrupted"
    except Exception as error:
        known = expected(error)
        if known is None:
            raise
        text = " ".join(known[1].split())
        is_file = choice.kind == "file"
        return text.replace(f"{Path(choice.names[0]).parent}{os.sep}", "") if is_file else text
    return None
