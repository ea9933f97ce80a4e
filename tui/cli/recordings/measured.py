"""Measures the figures of a recording or a running engine, for `stats` and `check`."""

import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from stepscope.engine.adapters.metrics.fetch import MetricsAddress, is_metrics_url
from stepscope.engine.protocol.silence import publishes
from stepscope.engine.transport.endpoints import Endpoint, find_local
from stepscope.recordings.compare.side.advice import Run
from stepscope.recordings.compare.side.feed import Feed, Stretch
from stepscope.recordings.compare.side.file_run import FileRun
from stepscope.recordings.compare.side.history_feed import HistoryFeed
from stepscope.recordings.compare.side.recording_feed import RecordingFeed
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, levels_said
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.connect import choose, connect
from stepscope.tui.cli.shared.levels import chosen_levels, level_of, note_own
from stepscope.tui.cli.shared.options import check_seconds
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.recording_path import RECORDING_SUFFIXES, find_recording, is_recorded
from stepscope.tui.settings.cli_errors import CommandFailed

LIVE_S = 60.0  # how much of an engine's past to measure by default
METRICS_S = 10.0  # how long to read a server's metrics by default: they have no past
_PROMPT_S = 1.0  # show progress only if an answer takes longer
_JOIN_S = 30.0  # how long an engine may take to send its past


class NothingMeasured(CommandFailed):
    """The session to measure holds no step."""


class MeasuredSession(NamedTuple):
    """The figures of a session.

    Attributes:
        figures: name -> value of every figure; None is unknown.
        run: what the figures were computed from; a `Side` if it is for a comparison.
    """

    name: str
    slo: SLO
    figures: Mapping[str, float | None]
    run: Run

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "slo": self.slo._asdict(), "figures": dict(self.figures)}


def measure(
    target: str | None,
    seconds: float | None,
    flags: Mapping[str, Any],
    command: str,
    *,
    for_comparison: bool = False,
) -> MeasuredSession:
    """Measure a recording, or the last seconds of a recording or of a running engine.

    Args:
        target: a recording or sample, else an engine, or the address of a server with /metrics;
            None: the only engine on this machine.
        seconds: None: the whole recording, or the last minute of an engine.
        flags: service levels that were given as options.
        command: the stepscope command that an error suggests.
        for_comparison: whether to read what a comparison needs: all messages.

    Raises:
        WrongUsage: `seconds` is not above 0.
        CommandFailed: there is no such recording or engine.
        NothingMeasured: the session holds no step.
        EngineUnreachable: nothing listens at the address.
    """
    check_seconds(seconds)
    if target is not None and is_metrics_url(target):
        levels = chosen_levels(flags)
        history = scraped(MetricsAddress.parse(target), seconds or METRICS_S, levels)
        return _of_history(history, target, None)
    if target is not None and is_recording(target):
        with Recording(find_recording(target)) as recording:
            slo = level_of(flags, recording)
            first = None
            if seconds is not None:
                start = recording.find_time(recording.end_ns - round(seconds * 1e9))
                before = recording.step_before(start)
                first = None if before is None else before + 1
            if not for_comparison:
                return _of_file(recording, target, slo, first)
        feed = RecordingFeed(Recording(find_recording(target)), target, slo, Stretch(first))
        side = read_side(feed)
        return MeasuredSession(target, slo, side.figures(), side)
    chosen = chosen_levels(flags)
    return _of_engine(choose(target, f"stepscope {command} {{}}"), seconds or LIVE_S, chosen)


def _of_file(recording: Recording, name: str, slo: SLO, first: int | None) -> MeasuredSession:
    with Progress() as progress:
        run = FileRun(recording, slo, first, lambda share: progress(f"reading {name}", share))
    if recording.message:
        print(f"stepscope: note: {recording.message}", file=sys.stderr)
    if not run.num_steps:
        raise NothingMeasured(f"{name}: there is no step to measure")
    return MeasuredSession(name, slo, run.figures(), run)


def is_recording(target: str) -> bool:
    """Whether a target is a file or a sample recording, not an engine.

    If an engine has the same name, the file or sample wins.
    """
    if target.startswith(("ipc://", "tcp://")):
        return False
    if target.endswith(RECORDING_SUFFIXES):
        return True
    try:
        return is_recorded(find_recording(target))
    except CommandFailed:
        if any(each.name == target for each in find_local()):
            return False
        raise


def read_side(feed: Feed) -> Side:
    """Read a run to its end and return its sums. Of a running engine, read all messages up to now.

    Raises:
        NothingMeasured: the run holds no step.
    """
    try:
        with Progress() as progress:
            while not feed.is_done and feed.share != 1.0:
                if not feed.read(time.monotonic() + 0.2) and feed.share is None:
                    break  # a live feed has no end: everything up to now has been read
                progress(f"reading {feed.name}", feed.share)
        if feed.note:
            print(f"stepscope: note: {feed.note}", file=sys.stderr)
        if feed.side is None or not feed.side.points.num_steps:
            raise NothingMeasured(f"{feed.name}: there is no step to measure")
        feed.side.settle()
        return feed.side
    finally:
        feed.close()


def last_seconds(endpoint: Endpoint, seconds: float, levels: Levels) -> History:
    """Fetch the last seconds of a running engine, as far as the engine keeps them.

    Args:
        levels: the service levels that the viewer chose; the others are the engine's.

    Raises:
        CommandFailed: the engine publishes nothing, or does not answer in time.
        EngineUnreachable: nothing listens at the endpoint.
    """
    with connect(endpoint) as client:
        if not publishes(client.info()):
            raise CommandFailed(
                f"{endpoint.name} publishes nothing (--no-telemetry): it has no figures"
            )
    source = Subscriber(endpoint, History(levels), past_s=seconds)
    source.start()
    try:
        with Progress() as progress:
            start_s = time.monotonic()
            while source.status != "live":
                waited_s = time.monotonic() - start_s
                if waited_s > _JOIN_S:
                    raise CommandFailed(
                        f"{endpoint.name} did not send its last {seconds:g} s: "
                        f"{source.error or 'no answer'}"
                    )
                if waited_s > _PROMPT_S:
                    progress(f"asking {endpoint.name} for its last {seconds:g} s", None)
                time.sleep(0.02)
    finally:
        source.stop()
    note_own(levels, levels_said(source.history.info))
    return source.history


def scraped(address: MetricsAddress, seconds: float, levels: Levels) -> History:
    """Read a server's metrics for some seconds, and at least twice.

    Raises:
        CommandFailed: the server does not answer.
    """
    from stepscope.recordings.live.scraper import Scraper  # imports a parser

    source = Scraper(address, history := History(levels))
    source.start()
    try:
        with Progress() as progress:
            start_s = time.monotonic()
            while (
                waited_s := time.monotonic() - start_s
            ) < seconds or not source.history.num_steps:
                if source.error is not None or waited_s > seconds + _JOIN_S:
                    raise CommandFailed(f"{address.control}: {source.error or 'no answer'}")
                if waited_s > _PROMPT_S:
                    progress(f"reading the metrics of {address.name}", min(1.0, waited_s / seconds))
                time.sleep(0.05)
    finally:
        source.stop()
    return history


def first_of(history: History, seconds: float) -> int | None:
    """Return the first step within the last `seconds` of a history.

    Returns None if all steps in memory are within them.
    """
    since_ns = history.state.time_ns - round(seconds * 1e9)
    step = history.step_at(since_ns)
    summary = None if step is None else history.summary(step)
    return None if summary is None or summary.tokens_ns > since_ns else summary.step + 1


def _of_engine(endpoint: Endpoint, seconds: float, levels: Levels) -> MeasuredSession:
    return _of_history(last_seconds(endpoint, seconds, levels), endpoint.name, seconds)


def _of_history(history: History, name: str, seconds: float | None) -> MeasuredSession:
    """The figures of the last seconds of a history; None: of all of it."""
    slo, first = history.slo, None if seconds is None else first_of(history, seconds)
    side = read_side(HistoryFeed(history, name, slo, Stretch(first)))
    return MeasuredSession(name, slo, history.figures(None, seconds), side)
