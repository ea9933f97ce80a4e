"""`studied`: reads what forecasts need, from a recording or from the next seconds of an engine."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.journal import Journal
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.simulation.basis import WhatIfBasis, basis_of
from stepscope.recordings.simulation.suspects import Seen, seen_of
from stepscope.recordings.simulation.what_if import ForecastStopped
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.recordings.measured import side_of
from stepscope.tui.cli.recordings.record import RecordedEngine, watch_recordings
from stepscope.tui.cli.shared.connect import connect, recording_or_engine
from stepscope.tui.cli.shared.levels import level_of
from stepscope.tui.cli.shared.options import check_seconds
from stepscope.tui.cli.shared.output import Progress
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.settings.cli_errors import Interrupted, WrongUsage

WATCH_S = 60.0


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
    target: str | None, seconds: float | None, command: str, flags: Mapping[str, Any]
) -> Iterator[Studied]:
    """Read what forecasts need from a recording, or first record a running engine for a while."""
    stop = StopSignals()
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
        engine = RecordedEngine(Subscriber(endpoint, Journal()), path, {})
        try:
            watch_recordings([engine], stop, seconds or WATCH_S, False, progress)
        finally:
            engine.stop()
        if engine.problem is not None:
            raise engine.problem
        try:
            with Recording(path) as recording:
                yield recording
        except RecordingError as error:  # name the engine: its temporary file is gone soon
            text = str(error).replace(str(path), endpoint.name)
            raise RecordingError(f"{text} (--seconds)") from error
