"""`studied`: reads what forecasts need, from a recording or from the next seconds of an engine."""

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.journal import Journal
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.simulation.basis import WhatIfBasis, basis_of
from stepscope.recordings.simulation.suspects import Seen, seen_of
from stepscope.recordings.simulation.what_if import ForecastStopped
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.recordings.measured import side_of
from stepscope.tui.cli.shared.connect import connect, recording_or_engine
from stepscope.tui.cli.shared.levels import level_flags, level_of
from stepscope.tui.cli.shared.options import check_seconds
from stepscope.tui.cli.shared.output import Progress
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage

WATCH_S = 60.0
_JOIN_S = 30.0
_TICK_S = 0.1


class Studied(NamedTuple):
    """A recording, its level, and what forecasts need of it; `on_run` may stop them."""

    recording: Recording
    level: SLO
    basis: WhatIfBasis
    on_run: Callable[[str, float], bool]

    def seen(self) -> Seen:
        """Return what the recorded steps say about the limits of the engine."""
        path = self.recording.path
        return seen_of(side_of(path, path.name, self.level), self.basis)


@contextmanager
def studied(
    target: str | None,
    seconds: float | None,
    command: str,
    slo_itl: str | None,
    slo_ttft: str | None,
) -> Iterator[Studied]:
    """Read what forecasts need from a recording, or first record a running engine for a while."""
    flags = level_flags(slo_itl, slo_ttft)
    stop = StopSignals(signal.SIGINT, signal.SIGTERM)
    with (
        stop,
        Progress() as progress,
        _watched(target, seconds, command, progress, stop) as recording,
    ):
        level = level_of(flags, recording)
        what = f"reading {recording.path.name}"
        basis = basis_of(recording, [level], lambda share: progress(what, share))

        def on_run(what: str, share: float) -> bool:
            progress(what, share)
            return bool(stop)

        try:
            yield Studied(recording, level, basis, on_run)
        except ForecastStopped as error:
            raise Interrupted("interrupted before the runs were done") from error


@contextmanager
def _watched(
    target: str | None, seconds: float | None, command: str, progress: Progress, stop: StopSignals
) -> Iterator[Recording]:
    check_seconds(seconds)
    endpoint = recording_or_engine(target, f"stepscope {command} {{}}")
    if isinstance(endpoint, Path):
        if seconds is not None:
            raise WrongUsage("--seconds: only for an engine; a recording is taken whole")
        with Recording(endpoint) as recording:
            yield recording
        return
    connect(endpoint).close()
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        path = Path(folder) / f"{endpoint.name}.mcap"
        _record(Subscriber(endpoint, Journal()), path, seconds or WATCH_S, progress, stop)
        try:
            with Recording(path) as recording:
                yield recording
        except RecordingError as error:  # name the engine: its temporary file is gone soon
            text = str(error).replace(str(path), endpoint.name)
            raise RecordingError(f"{text} (--seconds)") from error


def _record(
    source: Subscriber, path: Path, seconds: float, progress: Progress, stop: StopSignals
) -> None:
    recorder = Recorder(source, path)
    source.start()
    begun_s = time.monotonic()
    live_s: float | None = None  # when the telemetry began to arrive
    try:
        while live_s is None or time.monotonic() - live_s < seconds:
            if stop.wait(_TICK_S):
                raise Interrupted("interrupted while it watched the engine")
            now_s = time.monotonic()
            if live_s is None and source.status == "live":
                live_s = now_s
            is_late = live_s is None and now_s - begun_s > _JOIN_S
            if is_late or (live_s is not None and source.status == "down"):
                raise CommandFailed(f"{source.name} does not answer ({source.error})")
            share = 0.0 if live_s is None else min(1.0, (now_s - live_s) / seconds)
            progress(f"watching {source.name}", share, f"{recorder.num_steps:,} steps")
    finally:
        source.stop()
        recorder.stop()
    if recorder.state == "failed":
        raise CommandFailed(recorder.error or f"{path} could not be written")
