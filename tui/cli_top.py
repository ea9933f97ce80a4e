"""`stepscope top` and `stepscope replay`: the dashboard, of an engine or of a file."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from stepscope.recordings import samples
from stepscope.recordings.history import History
from stepscope.recordings.latency import SLO
from stepscope.recordings.mcap_index import PART_SUFFIX
from stepscope.recordings.reader import Recording
from stepscope.recordings.recorder import Recorder
from stepscope.recordings.replay import MAX_SPEED, MIN_SPEED, ReplaySource
from stepscope.recordings.subscriber import Subscriber
from stepscope.tui.cli_connect import choose, connect
from stepscope.tui.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.cli_options import resolve
from stepscope.tui.preferences import Preferences
from stepscope.tui.settings import DashboardSettings, config_path, load_actions
from stepscope.tui.terminal import cannot_be_drawn_on
from stepscope.tui.view import Axis, Sort

if TYPE_CHECKING:
    from stepscope.tui.actions import Action
    from stepscope.tui.theme import ThemeName


def top(endpoint: str | None, flags: Mapping[str, Any]) -> None:
    """Raises EngineUnreachable when nobody listens at the endpoint."""
    settings = resolve(DashboardSettings, "dashboard", flags)
    chosen = choose(endpoint, "stepscope top {}")
    connect(chosen).close()
    need_terminal("'stepscope record' and 'stepscope snapshot' work without one")
    source = Subscriber(chosen, new_history(settings))
    source.start()
    try:
        run_live(source, settings)
    finally:
        source.stop()


def new_history(settings: DashboardSettings) -> History:
    return History(SLO(ttft_ms=settings.slo_ttft_ms, itl_ms=settings.slo_itl_ms))


def need_terminal(otherwise: str) -> None:
    """Raises WrongUsage where there is nothing to draw on."""
    # Textual reads from the first of these and draws on the last.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise WrongUsage(f"the dashboard needs a terminal to draw on; {otherwise}")
    if (why_not := cannot_be_drawn_on(os.environ)) is not None:
        raise WrongUsage(f"{why_not}; {otherwise}")


def run_live(
    source: Subscriber, settings: DashboardSettings, recorder: Recorder | None = None
) -> None:
    """The dashboard of a source that has been started, until the operator leaves it."""
    # Textual is imported here so that an endpoint that is wrong is told of at once.
    from stepscope.tui.app import run_dashboard

    run_dashboard(
        source,
        source.history,
        control_endpoint=source.endpoint.control,
        recorder=recorder,
        **dashboard_options(settings),
    )


class DashboardOptions(TypedDict):
    """What `run_dashboard` takes from the settings."""

    readonly: bool
    fps: float | None
    ascii: bool | None
    theme: "ThemeName"
    sort: Sort
    axis: Axis
    actions: "tuple[Action, ...]"
    preferences: Preferences
    log_file: Path | None


def dashboard_options(settings: DashboardSettings) -> DashboardOptions:
    """The settings and the keys of the config file, for `run_dashboard`."""
    path, why_not = None, "--readonly"
    if not settings.keep:
        why_not = "--no-keep"
    elif config_path() == Path(os.devnull):
        why_not = "STEPSCOPE_CONFIG=none"
    elif not settings.readonly:
        path = config_path()
    began = {name: getattr(settings, name) for name in ("theme", "ascii", "fps", "sort", "axis")}
    return DashboardOptions(
        readonly=settings.readonly,
        fps=settings.fps,
        ascii=settings.ascii,
        theme=settings.theme,
        sort=settings.sort,
        axis=settings.axis,
        actions=load_actions(),
        preferences=Preferences(path, began, why_not),
        log_file=None if settings.log is None else Path(settings.log).expanduser(),
    )


def replay(file: str, speed: float | None, at: int | None, flags: Mapping[str, Any]) -> None:
    """Raises RecordingError when the file is none, WrongUsage for a step that is not in it."""
    settings = resolve(DashboardSettings, "dashboard", flags)
    if speed is not None and not MIN_SPEED <= speed <= MAX_SPEED:
        raise WrongUsage(f"--speed: expected {MIN_SPEED:g} to {MAX_SPEED:g}, got {speed:g}")
    with Recording(find_recording(file)) as recording:
        if recording.message is not None:
            print(f"stepscope: note: {recording.message}", file=sys.stderr)
        first, last = recording.first_step, recording.last_step
        if at is not None and (first is None or last is None or not first <= at <= last):
            raise WrongUsage(f"--at: {recording.path.name} holds steps {first} to {last}, not {at}")
        need_terminal("'stepscope record' makes recordings without one")
        source = ReplaySource(recording, new_history(settings), speed or 1.0, playing=at is None)
        source.start()
        try:
            if at is not None:
                source.seek(at)
            _run_replay(source, settings)
        finally:
            source.stop()


def _run_replay(source: ReplaySource, settings: DashboardSettings) -> None:
    from stepscope.tui.app import run_dashboard

    run_dashboard(source, source.history, **dashboard_options(settings))


def find_recording(file: str) -> Path:
    """The file of that name, or the sample that is shipped under it."""
    path = Path(file)
    if path.exists() or path.with_name(path.name + PART_SUFFIX).exists():
        return path  # `Recording` opens the unfinished file where there is no other
    folder = Path(samples.__file__).parent
    shipped = {each.stem: each for each in sorted(folder.glob("*.mcap"))}
    if (sample := shipped.get(file.removesuffix(".mcap"))) is not None:
        return sample
    known = f"; shipped samples: {', '.join(shipped)}" if shipped else ""
    raise CommandFailed(f"there is no recording {file}{known}")
