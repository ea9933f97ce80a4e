"""`stepscope top` and `stepscope replay`: the dashboard, of an engine or of a file."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypedDict

from stepscope.engine.client import EngineStarting
from stepscope.engine.config import ConfigError
from stepscope.engine.endpoints import Endpoint, find_local
from stepscope.recordings import samples
from stepscope.recordings.fleets.fleet import FLEET_STEPS, Fleet, shared_bytes
from stepscope.recordings.history import MAX_BYTES, MAX_STEPS, History
from stepscope.recordings.latency import SLO
from stepscope.recordings.reader import Recording
from stepscope.recordings.recorder import Recorder
from stepscope.recordings.recording_format import PART_SUFFIX
from stepscope.recordings.replay import ReplaySource
from stepscope.recordings.service_levels import levels_in
from stepscope.recordings.subscriber import Subscriber
from stepscope.recordings.tempo import MAX_SPEED, MIN_SPEED
from stepscope.tui.commands.connect import PAST_S, check_past, choose, connect, hello, receive
from stepscope.tui.commands.errors import CommandFailed, WrongUsage, expected
from stepscope.tui.commands.levels import judged_as
from stepscope.tui.commands.options import resolve
from stepscope.tui.commands.who import call_me
from stepscope.tui.preferences import Preferences
from stepscope.tui.recent import remember
from stepscope.tui.settings import DashboardSettings, FleetSettings, config_path, load_actions
from stepscope.tui.terminal import cannot_be_drawn_on
from stepscope.tui.view import Axis, Sort

if TYPE_CHECKING:
    from stepscope.tui.action_table import Action
    from stepscope.tui.theme import ThemeName

_WITH_WHOLE_PAST = 4  # engines side by side; of more there is less, for all of it is to be read


def top(
    endpoints: Sequence[str],
    flags: Mapping[str, Any],
    name: str | None = None,
    past_s: float = PAST_S,
) -> None:
    """One engine, or several side by side.

    Args:
        name: of the operator, for the audit.
        past_s: see `show_engines`.

    Raises:
        EngineUnreachable: nobody listens at the endpoint, nor will soon.
        CommandFailed: ... at any of several.
    """
    call_me(name)
    check_past(past_s)
    settings = resolve(DashboardSettings, "dashboard", flags)
    chosen = engines_to_show(endpoints)
    check_any(chosen)
    need_terminal("'stepscope record' and 'stepscope snapshot' work without one")
    if len(chosen) == 1:
        connect(chosen[0]).close()  # several show in their rows that they are still starting
    show_engines(chosen, settings, is_open=not named_engines(endpoints), past_s=past_s)


def named_engines(named: Sequence[str]) -> list[str]:
    """Those named, else those of the environment or the config file."""
    return list(named) or list(resolve(FleetSettings, "fleet", {}).engines)


def engines_to_show(named: Sequence[str]) -> list[Endpoint]:
    """Those named, else those of the environment or the config file, else all of this machine.

    Raises:
        ConfigError: one of them is no endpoint.
        CommandFailed: there is none at all.
    """
    names = named_engines(named)
    if names:
        return list(dict.fromkeys(Endpoint.parse(name) for name in names))
    found = find_local()
    return found if len(found) > 1 else [choose(None, "stepscope top {}")]


def check_any(endpoints: Sequence[Endpoint]) -> None:
    """That there is, or will be, anything to see; of several engines some may be down.

    Raises:
        EngineUnreachable: the only one does not answer, and is not starting.
        CommandFailed: none of several does.
    """
    if len(endpoints) == 1:
        with contextlib.suppress(EngineStarting):
            hello(endpoints[0]).close()
        return
    answers: SimpleQueue[str | None] = SimpleQueue()

    def ask(endpoint: Endpoint) -> None:
        try:
            hello(endpoint).close()
        except EngineStarting:
            answers.put(None)  # which its row says, until it has started
        except Exception as error:  # noqa: BLE001 - whatever it is: somebody waits for the answer
            known = expected(error)
            answers.put(f"{endpoint.name}: {repr(error) if known is None else known[1]}")
        else:
            answers.put(None)

    for endpoint in endpoints:
        Thread(target=ask, args=(endpoint,), name="hello", daemon=True).start()
    errors: list[str] = []
    while len(errors) < len(endpoints):
        error = answers.get()
        if error is None:
            return
        errors.append(error)
    raise CommandFailed(f"none of {len(errors)} engines answers; {'; '.join(sorted(errors))}")


def show_engines(
    endpoints: Sequence[Endpoint],
    settings: DashboardSettings,
    is_open: bool = False,
    past_s: float = PAST_S,
) -> None:
    """The dashboard of these engines, until the operator leaves it.

    Args:
        is_open: engines that appear on this machine meanwhile are shown too.
        past_s: seconds of what an engine did before, to begin with; many of them share it.
    """
    known = set(endpoints)
    past_s *= min(1.0, _WITH_WHOLE_PAST / len(endpoints))

    def newcomers() -> list[Subscriber]:
        try:
            found = [each for each in find_local() if each not in known]
        except (ConfigError, OSError):  # the folder of the sockets is not ours any more
            return []
        known.update(found)
        return [receive(each, new_history(settings, FLEET_STEPS), past_s) for each in found]

    if len(endpoints) == 1:
        sources = [receive(endpoints[0], new_history(settings), past_s)]
    else:
        share = shared_bytes(len(endpoints))
        sources = [
            receive(endpoint, new_history(settings, FLEET_STEPS, share), past_s)
            for endpoint in endpoints
        ]
    fleet = Fleet(sources, newcomers=newcomers if is_open else None)
    fleet.start()
    try:
        run_live(sources[0], settings, fleet=fleet)
    finally:
        fleet.stop()


def new_history(
    settings: DashboardSettings, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES
) -> History:
    slo = SLO(ttft_ms=settings.slo_ttft_ms, itl_ms=settings.slo_itl_ms)
    return History(slo, max_steps, max_bytes)


def need_terminal(otherwise: str) -> None:
    """Raises WrongUsage where there is nothing to draw on."""
    # Textual reads from the first of these and draws on the last.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise WrongUsage(f"the dashboard needs a terminal to draw on; {otherwise}")
    if (why_not := cannot_be_drawn_on(os.environ)) is not None:
        raise WrongUsage(f"{why_not}; {otherwise}")


def run_live(
    source: Subscriber,
    settings: DashboardSettings,
    recorder: Recorder | None = None,
    fleet: Fleet | None = None,
    keeps_levels: bool = True,
    news: Callable[[], str | None] | None = None,
) -> None:
    """The dashboard of a source that has been started, until the operator leaves it.

    Args:
        news: as in `run_dashboard`.
    """
    # Textual is imported here so that an endpoint that is wrong is told of at once.
    from stepscope.tui.run import run_dashboard

    run_dashboard(
        source,
        source.history,
        control_endpoint=source.endpoint.control,
        recorder=recorder,
        fleet=fleet,
        news=news,
        **dashboard_options(settings, keeps_levels),
    )


class DashboardOptions(TypedDict):
    """What `run_dashboard` takes from the settings."""

    readonly: bool
    fps: float | None
    ascii: bool | None
    theme: "ThemeName"
    sort: Sort
    axis: Axis
    own_load: bool
    actions: "tuple[Action, ...]"
    preferences: Preferences
    log_file: Path | None


def dashboard_options(settings: DashboardSettings, keeps_levels: bool = True) -> DashboardOptions:
    """The settings and the keys of the config file, for `run_dashboard`.

    Args:
        keeps_levels: service levels that are changed are for the next time, too.
    """
    path, why_not = None, "--readonly"
    if not settings.keep:
        why_not = "--no-keep"
    elif config_path() == Path(os.devnull):
        why_not = "STEPSCOPE_CONFIG=none"
    elif not settings.readonly:
        path = config_path()
    kept = ["theme", "ascii", "fps", "sort", "axis", "own_load"]
    if keeps_levels:
        kept += ["slo_ttft_ms", "slo_itl_ms"]
    began = {name: getattr(settings, name) for name in kept}
    return DashboardOptions(
        readonly=settings.readonly,
        fps=settings.fps,
        ascii=settings.ascii,
        theme=settings.theme,
        sort=settings.sort,
        axis=settings.axis,
        own_load=settings.own_load,
        actions=load_actions(),
        preferences=Preferences(path, began, why_not),
        log_file=None if settings.log is None else _writable(Path(settings.log).expanduser()),
    )


def _writable(path: Path) -> Path:
    """A file that was named for errors; WrongUsage where none can be written to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise WrongUsage(f"--log: {path} cannot be written: {error.strerror}") from error
    return path


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
        need_terminal("'stepscope explain', 'screenshot' and 'export' work without one")
        carried = levels_in(recording.metadata)
        settings = judged_as(settings, flags, carried)
        source = ReplaySource(recording, new_history(settings), speed or 1.0, playing=at is None)
        source.start()
        if recording.path not in samples.shipped().values():
            remember(recording.path)
        try:
            if at is not None:
                source.seek(at)
            # What is good enough for one session is not meant for the next.
            _run_replay(source, settings, keeps_levels=not carried)
        finally:
            source.stop()


def _run_replay(source: ReplaySource, settings: DashboardSettings, keeps_levels: bool) -> None:
    from stepscope.tui.run import run_dashboard

    run_dashboard(source, source.history, **dashboard_options(settings, keeps_levels))


def find_recording(file: str) -> Path:
    """The file of that name, or the sample that is shipped under it."""
    if not file:
        raise WrongUsage("FILE: expected the name of a recording, got ''")
    path = Path(file)
    if path.exists() or path.with_name(path.name + PART_SUFFIX).exists():
        return path  # `Recording` opens the unfinished file where there is no other
    shipped = samples.shipped()
    if (sample := shipped.get(file.removesuffix(".mcap"))) is not None:
        return sample
    known = f"; shipped samples: {', '.join(shipped)}" if shipped else ""
    raise CommandFailed(f"there is no recording {file}{known}")
