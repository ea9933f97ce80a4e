"""`stepscope record --incidents DIR`: records only the time around an alert rule that fires."""

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.alerts.rule import parse_rule
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.file.writing.rotation import SeriesLimits
from stepscope.recordings.history.history import History
from stepscope.recordings.incidents.keeper import (
    DEFAULT_RULES,
    IncidentFolder,
    IncidentKeeper,
    KeptIncident,
)
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.shared.levels import chosen_rules
from stepscope.tui.cli.shared.output import Progress, say
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.recent import remember
from stepscope.tui.settings.setting_values import milliseconds
from stepscope.tui.views.format import plural

_TICK_S = 0.25
_COMMAND_S = 60.0  # time limit of --on-incident
_MAX_STEPS = 500_000
_MAX_BYTES = 256 * 1024 * 1024


class IncidentOptions(NamedTuple):
    """The values of `--incidents` and of the other options about incidents."""

    folder: str
    before: str
    after: str
    keep: str | None
    when: Sequence[str]
    on_incident: str | None


def keep_incidents(
    chosen: Endpoint, options: IncidentOptions, levels: Levels, seconds: float | None
) -> None:
    """Watch an engine, also if it restarts, and keep a file of each incident, for `seconds`."""
    rules = chosen_rules(options.when) or tuple(parse_rule(text) for text in DEFAULT_RULES)
    before_s, after_s = _seconds("--before", options.before), _seconds("--after", options.after)
    kept = series_limits("--keep", options.keep)
    if kept is not None and kept.num_bytes is None:
        raise WrongUsage(f"--keep: with --incidents a size such as 2GB, got {options.keep}")
    folder = IncidentFolder(Path(options.folder), kept and kept.num_bytes)
    source = Subscriber(chosen, History(levels, _MAX_STEPS, _MAX_BYTES), past_s=before_s)
    keeper = IncidentKeeper(source, rules, folder, before_s, after_s)
    reporter = _Reporter(options.on_incident)
    start_s = time.monotonic()
    stop = StopSignals()
    with stop:
        source.start()
        try:
            with Progress() as progress:
                while not stop.wait(_TICK_S):
                    reporter.report(keeper.look())
                    state = "an incident goes on" if keeper.is_open else "no incident now"
                    progress(f"watching {source.name}", None, f"{state}, {reporter.text}")
                    if seconds is not None and time.monotonic() - start_s >= seconds:
                        break
                reporter.report(keeper.close())
        finally:
            source.stop()
            reporter.close()
    left_out = f", {keeper.num_left_out} more not written" if keeper.num_left_out else ""
    say(f"{reporter.text} in {folder.path}{left_out}")
    if reporter.error is not None:
        raise CommandFailed(reporter.error)


def _seconds(option: str, text: str) -> float:
    seconds = milliseconds(option, text) / 1e3
    if seconds < 1:
        raise WrongUsage(f"{option}: expected 1s or more, got {text!r}")
    return seconds


def series_limits(option: str, text: str | None) -> SeriesLimits | None:
    """Return the size and the age that an option sets."""
    try:
        return None if text is None else SeriesLimits.parse(text)
    except ValueError as error:
        raise WrongUsage(f"{option}: {error}") from error


class _Reporter:
    """Prints a line for each incident kept, and starts the operator's command for it."""

    def __init__(self, command: str | None) -> None:
        self.error: str | None = None
        self._command = None if command is None else shlex.split(command)
        self._num_kept = 0
        self._running: list[threading.Thread] = []

    @property
    def text(self) -> str:
        return f"{plural(self._num_kept, 'incident')} kept"

    def report(self, kept: KeptIncident | None) -> None:
        if kept is None:
            return
        self.error = kept.error
        incident = kept.incident
        where = kept.error if kept.path is None else str(kept.path)
        say(f"{time.strftime('%H:%M:%S')} {where}: {incident.text}")
        if incident.explanation:
            say(f"         {incident.explanation}")
        if kept.path is not None:
            self._num_kept += 1
            remember(kept.path)
        if self._command is not None:
            document = {"path": None if kept.path is None else str(kept.path), "error": kept.error}
            document |= msgspec.to_builtins(incident)
            thread = threading.Thread(
                target=_run, args=([*self._command, str(kept.path or "")], json.dumps(document))
            )
            thread.start()
            self._running = [each for each in self._running if each.is_alive()] + [thread]

    def close(self) -> None:
        """Wait until the operator's commands have ended."""
        for each in self._running:
            each.join()


def _run(command: Sequence[str], text: str) -> None:
    try:
        subprocess.run(command, input=text, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"--on-incident failed: {error}")
