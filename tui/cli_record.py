"""`stepscope record`: a session into a file, without a screen."""

import os
import signal
import time
from pathlib import Path

from stepscope.recordings.history import History
from stepscope.recordings.recorder import Recorder
from stepscope.recordings.subscriber import Subscriber
from stepscope.tui.cli_connect import choose, connect
from stepscope.tui.cli_errors import CommandFailed, WrongUsage, say
from stepscope.tui.cli_progress import Progress
from stepscope.tui.cli_signals import StopSignals

_TICK_S = 0.2
_GONE_S = 10.0  # an engine that is silent for so long does not come back in this recording
_MAX_STEPS = 1_000  # in memory; the file has them all


def record(endpoint: str | None, file: str, seconds: float | None) -> None:
    """Record until a signal, `seconds` have passed, or the engine ends.

    Raises:
        CommandFailed: the file cannot be written, or the engine vanished.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise WrongUsage(f"--seconds: expected a number above 0, got {seconds}")
    output = Path(file)
    if file.endswith(os.sep) or output.is_dir():
        raise CommandFailed(f"{file} is a folder; name the file to write in it")
    if not output.parent.is_dir():
        raise CommandFailed(f"{output} cannot be written: {output.parent} is no folder")
    if output.exists():
        raise CommandFailed(f"{output} is there already; remove it or choose another name")
    chosen = choose(endpoint, "stepscope record {} -o FILE")
    connect(chosen).close()
    source = Subscriber(chosen, History(max_steps=_MAX_STEPS))
    recorder = Recorder(source, output)
    stop = StopSignals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with stop:
        source.start()
        try:
            with Progress() as progress:
                why = _watch(source, recorder, stop, seconds, progress)
        finally:
            source.stop()
            recorder.stop()
    if recorder.state == "failed":
        raise CommandFailed(recorder.error or f"{output} could not be written")
    lost = f"{source.history.num_lost} messages lost"
    say(f"{output}: {recorder.num_steps:,} steps, {size(recorder.num_bytes)}, {lost}")
    if why is not None:
        raise CommandFailed(f"{why}; {output} holds what came until then")
    if recorder.error is not None:
        say(recorder.error)


def _watch(
    source: Subscriber,
    recorder: Recorder,
    stop: StopSignals,
    seconds: float | None,
    progress: Progress,
) -> str | None:
    """Wait for the end; what was wrong when it came too early."""
    start_s = last_live_s = time.monotonic()
    while not stop.wait(_TICK_S):
        now_s = time.monotonic()
        if source.status in ("live", "stale"):
            last_live_s = now_s
        elapsed_s = now_s - start_s
        share = None if seconds is None else min(1.0, elapsed_s / seconds)
        progress(
            f"recording {source.name}",
            share,
            f"{elapsed_s:.0f} s, {recorder.num_steps:,} steps, {size(recorder.num_bytes)}",
        )
        if recorder.state != "recording" or recorder.error is not None:
            return None
        if source.history.state.state == "stopped":
            return None
        if seconds is not None and elapsed_s >= seconds:
            return None
        if now_s - last_live_s > _GONE_S:
            return f"the engine does not answer any more ({source.error})"
    return None


def size(num_bytes: int) -> str:
    """For a person."""
    if num_bytes < 1_000_000:
        return f"{num_bytes / 1000:.1f} kB"
    return f"{num_bytes / 1_000_000:.1f} MB"
