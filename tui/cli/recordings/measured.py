"""Measures the figures of a recording or a running engine, and fetches an engine's last seconds."""

import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.engine.adapters.metrics.fetch import MetricsAddress, is_metrics_url
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.compare.advice import Run
from stepscope.recordings.compare.feed import Feed, HistoryFeed
from stepscope.recordings.compare.file_run import FileRun
from stepscope.recordings.compare.recording_feed import RecordingFeed
from stepscope.recordings.compare.side import Side
from stepscope.recordings.errors import RecordingError, TooLittleData
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import Levels, levels_said
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.history.history import History
from stepscope.recordings.history.memory_file import write_memory
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.shared.connect import connect, recording_or_engine
from stepscope.tui.cli.shared.levels import chosen_levels, level_of, note_own
from stepscope.tui.cli.shared.output import Progress, note, session_text
from stepscope.tui.cli.shared.process import running
from stepscope.tui.session.live_source import LiveSource
from stepscope.tui.settings.cli_errors import CommandFailed

LIVE_S = 60.0  # how much of an engine's past to measure by default
_METRICS_S = 10.0  # how long to read a server's metrics by default: they have no past
_PROMPT_S = 1.0  # show progress only if an answer takes longer
_JOIN_S = 30.0  # how long an engine may take to send its past


class MeasuredSession(NamedTuple):
    """The figures of a session by name (None is unknown), and the sums that they come from."""

    name: str
    slo: SLO
    figures: Mapping[str, float | None]
    run: Run
    last_s: float | None = None  # only so much of it was measured; None: all of it

    @property
    def text(self) -> str:
        steps, seconds = self.figures["steps"], self.figures["seconds"] or 0.0
        return session_text(self.name, steps, seconds, self.last_s)

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
    """Measure a recording, an engine (None: the only one here) or a page of metrics.

    `seconds`: how much of its end; None: a whole recording, or a minute of an engine.
    `for_comparison`: whether to read what a comparison needs, a `Side`: all messages.
    """
    if target is not None and is_metrics_url(target):
        address = MetricsAddress.parse(target)
        return _of_history(scraped(address, seconds or _METRICS_S, chosen_levels(flags)), target)
    chosen = recording_or_engine(target, f"stepscope {command} {{}}")
    if isinstance(chosen, Endpoint):
        seconds = seconds or LIVE_S
        history = last_seconds(chosen, seconds, chosen_levels(flags))
        return _of_history(history, chosen.name, seconds)
    name = target or ""
    with Recording(chosen) as recording, Progress() as progress:
        slo, first = level_of(flags, recording), None
        if seconds is not None:
            start = recording.find_time(recording.end_ns - round(seconds * 1e9))
            before = recording.step_before(start)
            first = None if before is None else before + 1
        if not for_comparison:
            run = FileRun(recording, slo, first, lambda share: progress(f"reading {name}", share))
            note(recording.message)
            if not run.num_steps:
                raise TooLittleData(f"{name}: there is no step to measure")
            return MeasuredSession(name, slo, run.figures(), run, seconds)
    side = side_of(chosen, name, slo, StepRange(first))
    return MeasuredSession(name, slo, side.figures(), side, seconds)


def side_of(path: Path, name: str, slo: SLO, stretch: StepRange | None = None) -> Side:
    return read_side(RecordingFeed(Recording(path), name, slo, stretch or StepRange()))


def read_side(feed: Feed) -> Side:
    """Read a run to its end, or a running engine up to now, and return its sums."""
    try:
        with Progress() as progress:
            while not feed.is_done and feed.share != 1.0:
                if not feed.read(time.monotonic() + 0.2) and feed.share is None:
                    break  # a live feed has no end: everything up to now has been read
                progress(f"reading {feed.name}", feed.share)
        note(feed.note)
        if feed.side is None or feed.side.points.first_step is None:
            raise TooLittleData(f"{feed.name}: there is no step to measure")
        feed.side.settle()
        return feed.side
    finally:
        feed.close()


@contextmanager
def recorded(
    target: str | None, seconds: float | None, flags: Mapping[str, Any], usage: str
) -> Iterator[tuple[str, Recording]]:
    """Yield the name and the recording of a target: of an engine, one of its last seconds."""
    chosen = recording_or_engine(target, usage)
    if isinstance(chosen, Path):
        with Recording(chosen) as recording:
            yield target or "", recording
        return
    seconds = seconds or LIVE_S
    history = last_seconds(chosen, seconds, chosen_levels(flags))
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        path = Path(folder) / f"{chosen.name}.mcap"
        write_memory(history, path, lambda share: None, first=_first_of(history, seconds))
        try:
            with Recording(path) as recording:
                yield chosen.name, recording
        except RecordingError as error:  # name the engine: its temporary file is gone soon
            raise type(error)(str(error).replace(str(path), chosen.name)) from error


def last_seconds(endpoint: Endpoint, seconds: float, levels: Levels) -> History:
    """Fetch the last seconds of a running engine, as far as it keeps them."""
    name = endpoint.name
    with connect(endpoint) as client:
        if not client.info().publishes:
            raise CommandFailed(f"{name} publishes nothing (--no-telemetry): it has no figures")
    source = Subscriber(endpoint, History(levels), past_s=seconds)
    with closing(_waiting(source, f"asking {name} for its last {seconds:g} s", None)) as looks:
        for waited_s in looks:
            if source.status == "live":
                break
            if waited_s > _JOIN_S:
                why = source.error or "no answer"
                raise CommandFailed(f"{name} did not send its last {seconds:g} s: {why}")
    note_own(levels, levels_said(source.history.info))
    return source.history


def scraped(address: MetricsAddress, seconds: float, levels: Levels) -> History:
    """Read a server's metrics for some seconds, and at least twice."""
    from stepscope.recordings.live.scraper import Scraper  # imports a parser

    source = Scraper(address, history := History(levels))
    with closing(_waiting(source, f"reading the metrics of {address.name}", seconds)) as looks:
        for waited_s in looks:
            if source.error is not None or waited_s > seconds + _JOIN_S:
                raise CommandFailed(f"{address.control}: {source.error or 'no answer'}")
            if waited_s >= seconds and history.num_steps:
                break
    return history


def _waiting(source: LiveSource, what: str, seconds: float | None) -> Generator[float, None, None]:
    """Run a source; yield how long it runs, again and again, and show that it takes a while."""
    start_s = time.monotonic()
    with running(source), Progress() as progress:
        while True:
            yield (waited_s := time.monotonic() - start_s)
            if waited_s > _PROMPT_S:
                progress(what, None if seconds is None else min(1.0, waited_s / seconds))
            time.sleep(0.02)


def _first_of(history: History, seconds: float) -> int | None:
    """Return the first step in the last seconds of a history; None if all steps are in them."""
    since_ns = history.state.time_ns - round(seconds * 1e9)
    step = history.step_at(since_ns)
    summary = None if step is None else history.summary(step)
    return None if summary is None or summary.tokens_ns > since_ns else summary.step + 1


def _of_history(history: History, name: str, seconds: float | None = None) -> MeasuredSession:
    first = None if seconds is None else _first_of(history, seconds)
    side = read_side(HistoryFeed(history, name, history.slo, StepRange(first)))
    return MeasuredSession(name, history.slo, history.windows.figures(None, seconds), side, seconds)
