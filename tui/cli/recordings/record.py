"""`stepscope record`: records a session to files, or only the time around rules that fire."""

import json
import math
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.alerts.keeper import (
    DEFAULT_RULES,
    IncidentFolder,
    IncidentKeeper,
    KeptIncident,
)
from stepscope.recordings.alerts.rule import parse_rule
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.file.writing.rotation import (
    MIN_ROTATE_BYTES,
    MIN_ROTATE_S,
    FileSeries,
    SeriesLimits,
)
from stepscope.recordings.history.history import History
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.shared.arguments import output_path
from stepscope.tui.cli.shared.connect import choose, connect, wait_for_any
from stepscope.tui.cli.shared.levels import chosen_levels, chosen_rules
from stepscope.tui.cli.shared.options import EngineName, Past, Wait, command, option, seconds_option
from stepscope.tui.cli.shared.output import Progress, note, say
from stepscope.tui.cli.shared.process import StopSignals, running
from stepscope.tui.session.live_source import Address, LiveSource, addresses, receive
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import milliseconds
from stepscope.tui.views.format import file_size, plural

_TICK_S = 0.2
_GONE_S = 10.0  # an engine that is silent for longer counts as gone
_LOOK_S = 0.25  # how often the rules of incidents are judged
_COMMAND_S = 60.0  # time limit of --on-incident
_MAX_STEPS = 500_000  # in memory, for incidents
_MAX_BYTES = 256 * 1024 * 1024
_FEW_BYTES = 1024 * 1024  # in memory, where all goes into the file


@command(
    "stepscope record -o session.mcap --seconds 60",
    "stepscope record -o incident.mcap --past 300 --seconds 1",
    "stepscope record engine-0 -o week.mcap --rotate 1GB --keep 48h",
    "stepscope record engine-0 --incidents kept --keep 2GB",
    sections=("levels",),
    takes_key=True,
)
def record(
    endpoint: EngineName = None,
    *,
    output: str | None = option("FILE", "the file to write (MCAP)", "--output", "-o"),
    seconds: float | None = seconds_option("how long to record (default: until Ctrl-C)"),
    past: Past = 0.0,
    rotate: str | None = option(
        "SIZE,AGE",
        "begin a new file, FILE-TIME-NUMBER.mcap, at this size or age (1GB, 1h or 1GB,1h)",
    ),
    keep: str | None = option(
        "SIZE,AGE",
        "with --rotate: delete this recorder's files beyond this age or total size: 48h, "
        "100GB; with --incidents a size: the last 5 stay",
    ),
    incidents: str | None = option(
        "DIR", "write a file into DIR only when a rule fires; without prompts and outputs"
    ),
    when: list[str] | None = option(
        "RULE", "with --incidents: a rule as of 'watch' (default: [[alerts]], else a built-in set)"
    ),
    before: str = option(
        "TIME", "with --incidents: time to keep before the rule fires", default="30s"
    ),
    after: str = option("TIME", "with --incidents: time to keep after it ends", default="10s"),
    on_incident: str | None = option(
        "COMMAND", "with --incidents: run COMMAND PATH for each file, a JSON summary on its stdin"
    ),
    wait: Wait = True,
    flags: dict[str, Any],
) -> None:
    """Record every step of an engine to a file, without a screen.

    The file stores the service levels of these options, or else of [dashboard] in the config file.
    Commands that open the file judge breaches by them.
    """
    if incidents is not None:
        if output is not None or rotate is not None or past:
            raise WrongUsage("--incidents: not with --output, --rotate or --past")
        kept = _series_limits("--keep", keep)
        if kept is not None and kept.num_bytes is None:
            raise WrongUsage(f"--keep: with --incidents a size such as 2GB, got {keep}")
        past_s, after_s = _seconds("--before", before), _seconds("--after", after)
        rules = chosen_rules(when or ()) or tuple(parse_rule(text) for text in DEFAULT_RULES)
        _engines(endpoint, wait)
        chosen = choose(endpoint, "stepscope record {} --incidents DIR")
        connect(chosen).close()
        folder = IncidentFolder(Path(incidents), kept and kept.num_bytes)
        history = History(chosen_levels(flags), _MAX_STEPS, _MAX_BYTES)
        engine = Subscriber(chosen, history, past_s=past_s)
        keeper = IncidentKeeper(engine, rules, folder, past_s, after_s)
        _keep_incidents(engine, keeper, folder.path, _Reporter(on_incident), seconds)
        return
    if output is None:
        raise WrongUsage("name the file with --output, or a folder with --incidents")
    if keep is not None and rotate is None:
        raise WrongUsage("--keep: only with --rotate or --incidents")
    levels = chosen_levels(flags)
    limits, kept = _series_limits("--rotate", rotate), _series_limits("--keep", keep)
    if limits is not None and (limits.num_bytes or MIN_ROTATE_BYTES) < MIN_ROTATE_BYTES:
        raise WrongUsage(f"--rotate: expected {file_size(MIN_ROTATE_BYTES)} or more, got {rotate}")
    if limits is not None and (limits.age_s or MIN_ROTATE_S) < MIN_ROTATE_S:
        raise WrongUsage(f"--rotate: expected {MIN_ROTATE_S:g} s or more, got {rotate}")
    output_path(output)  # its folder is there, before a wait
    engines = _engines(endpoint, wait)
    files, path = [output], Path(output)
    if len(engines) > 1:  # data-parallel ranks: run.dp0.mcap, run.dp1.mcap and so on
        files = [str(path.with_suffix(f".dp{i}{path.suffix}")) for i in range(len(engines))]
    outputs = [output_path(each, is_new=limits is None) for each in files]
    sources = [_source(each, past) for each in engines]
    # Catch signals before a file exists, so that none can leave it unfinished.
    with StopSignals() as stop, Progress() as progress:
        sessions: list[RecordedEngine] = []
        try:
            for source, file in zip(sources, outputs, strict=True):
                target = file if limits is None else FileSeries(file, limits, kept)
                sessions.append(RecordedEngine(source, target, levels))
            watch_recordings(sessions, stop, seconds, progress)
        finally:
            for session in sessions:
                session.source.stop()
                session.recorder.stop()
    for problem in [session.report() for session in sessions]:
        if problem is not None:
            raise problem


def _engines(endpoint: str | None, waits: bool) -> Sequence[Address]:
    """Return the address that is meant, or those of the data-parallel ranks of one name."""
    if endpoint is None:
        return [choose(None, "stepscope record {} -o FILE")]
    return wait_for_any(lambda: addresses(endpoint), waits)


class RecordedEngine:
    """One engine and its recorder. A series of files waits for the next engine."""

    def __init__(self, source: LiveSource, target: Path | FileSeries, levels: Levels) -> None:
        self.source = source
        self.recorder = Recorder(source, target, levels)
        self.problem: CommandFailed | None = None  # why the recording ended too early, if it did
        self.is_over = self.is_joined = False
        self._heard_s = time.monotonic()
        self._is_series = isinstance(target, FileSeries)
        self._num_steps = 0
        source.start()

    def look(self, now_s: float) -> None:
        source, recorder = self.source, self.recorder
        self.is_joined = self.is_joined or source.status == "live" or source.error is not None
        if source.status in ("live", "stale") or recorder.num_steps > self._num_steps:
            self._heard_s, self._num_steps = now_s, recorder.num_steps
        self.is_over = recorder.state != "recording" or recorder.error is not None
        if self._is_series or self.is_over:
            return
        is_gone = now_s - self._heard_s > _GONE_S
        self.is_over = is_gone or source.history.state.state == "stopped"
        if is_gone and source.history.state.state != "stopped":
            self.problem = CommandFailed(f"the engine no longer answers ({source.error})")

    def report(self) -> CommandFailed | None:
        """Print what was recorded. Returns the error with which the command must end, if any."""
        recorder = self.recorder
        if recorder.state == "failed":
            return CommandFailed(recorder.error or f"{recorder.path} could not be written")
        lost = f"{self.source.history.num_lost} messages lost"
        what = f"{recorder.path}: " if recorder.num_files == 1 else f"{recorder.num_files} files, "
        last = "" if recorder.num_files == 1 else f", the last one {recorder.path}"
        say(f"{what}{recorder.num_steps:,} steps, {file_size(recorder.num_bytes)}, {lost}{last}")
        if self.problem is not None:
            text = f"{self.problem}; {recorder.path} holds what came before"
            return type(self.problem)(text)
        # An engine that restarted ends the recording.
        return None if recorder.error is None else CommandFailed(recorder.error)


def _source(address: Address, past_s: float) -> LiveSource:
    if isinstance(address, Endpoint):
        with connect(address) as client:
            if not client.info().publishes:
                why = "publishes nothing (--no-telemetry): no step of it will be in the recording"
                note(f"{address.name} {why}")
    return receive(address, History(max_bytes=_FEW_BYTES), past_s)


def watch_recordings(
    sessions: Sequence[RecordedEngine], stop: StopSignals, seconds: float | None, progress: Progress
) -> None:
    """Show progress until all recordings are over, `seconds` have passed, or a signal arrives."""
    start_s = time.monotonic()
    names = ", ".join(session.source.name for session in sessions)
    recorders = [session.recorder for session in sessions]
    while not stop.wait(_TICK_S):
        now_s = time.monotonic()
        for session in sessions:
            if not session.is_over:
                session.look(now_s)
        if not all(session.is_joined for session in sessions):
            start_s = now_s  # `seconds` start once every engine has joined and sent its past
        elapsed_s = now_s - start_s
        size = file_size(sum(each.num_bytes for each in recorders))
        detail = f"{elapsed_s:.0f} s, {sum(each.num_steps for each in recorders):,} steps, {size}"
        if (number := max(each.num_files for each in recorders)) > 1:
            detail += f", file {number}"
        what = "recording"
        if all(each.is_joined and each.source.status != "live" for each in sessions):
            what, detail = "waiting for", f"{detail}; {sessions[0].source.error}"
        share = None if seconds is None else min(1.0, elapsed_s / seconds)
        progress(f"{what} {names}", share, detail)
        if all(session.is_over for session in sessions) or elapsed_s >= (seconds or math.inf):
            return
    elapsed_s = time.monotonic() - start_s
    if seconds is not None and elapsed_s < seconds:
        sessions[0].problem = Interrupted(f"interrupted after {elapsed_s:.0f} of {seconds:g} s")


def _keep_incidents(
    engine: Subscriber,
    keeper: IncidentKeeper,
    folder: Path,
    reporter: "_Reporter",
    seconds: float | None,
) -> None:
    with StopSignals() as stop, Progress() as progress, reporter.pool, running(engine):
        for _ in stop.ticks(_LOOK_S, seconds):
            reporter.report(keeper.look())
            state = "an incident goes on" if keeper.is_open else "no incident now"
            progress(f"watching {engine.name}", None, f"{state}, {reporter.text}")
        reporter.report(keeper.close())
    left_out = f", {keeper.num_left_out} more not written" if keeper.num_left_out else ""
    say(f"{reporter.text} in {folder}{left_out}")
    if reporter.error is not None:
        raise CommandFailed(reporter.error)


def _seconds(option: str, text: str) -> float:
    seconds = milliseconds(option, text) / 1e3
    if seconds < 1:
        raise WrongUsage(f"{option}: expected 1s or more, got {text!r}")
    return seconds


def _series_limits(option: str, text: str | None) -> SeriesLimits | None:
    try:
        return None if text is None else SeriesLimits.parse(text)
    except ValueError as error:
        raise WrongUsage(f"{option}: {error}") from error


class _Reporter:
    """Prints a line for each incident kept, and runs the operator's command for it on a thread."""

    def __init__(self, command: str | None) -> None:
        self.pool = ThreadPoolExecutor()
        self.error: str | None = None
        self._command = None if command is None else shlex.split(command)
        self._num_kept = 0

    @property
    def text(self) -> str:
        return f"{plural(self._num_kept, 'incident')} kept"

    def report(self, kept: KeptIncident | None) -> None:
        if kept is None:
            return
        self.error, incident = kept.error, kept.incident
        path = None if kept.path is None else str(kept.path)
        say(f"{time.strftime('%H:%M:%S')} {path or kept.error}: {incident.text}")
        if incident.explanation:
            say(f"         {incident.explanation}")
        self._num_kept += path is not None
        if self._command is not None:
            document = {"path": path, "error": kept.error, **msgspec.to_builtins(incident)}
            self.pool.submit(_run, [*self._command, path or ""], json.dumps(document))


def _run(command: Sequence[str], text: str) -> None:
    try:
        subprocess.run(command, input=text, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # such as a NUL in a word
        say(f"--on-incident failed: {error}")
