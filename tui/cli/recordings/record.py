"""`stepscope record`: a session into a file or a series of files, without a screen."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stepscope.engine.adapters.metrics.address import MetricsAddress, is_metrics_url
from stepscope.engine.adapters.sglang.forward_passes import PREFIX, ForwardPassAddress
from stepscope.engine.protocol.silence import publishes
from stepscope.recordings.file.writing.rotation import (
    MIN_ROTATE_BYTES,
    MIN_ROTATE_S,
    FileSeries,
    SeriesLimits,
)
from stepscope.recordings.history.journal import Journal
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.recordings import incidents as incidents_command
from stepscope.tui.cli.recordings.incidents import IncidentOptions
from stepscope.tui.cli.shared.connect import check_metrics, check_past, choose, connect
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.levels import chosen_levels, level_flags
from stepscope.tui.cli.shared.output_path import output_path
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.session.control.variation import KnobRange, KnobVariation
from stepscope.tui.session.control.who import who
from stepscope.tui.session.live_source import LiveSource, receive
from stepscope.tui.settings.cli_errors import CommandFailed, Interrupted, WrongUsage
from stepscope.tui.settings.recent import remember
from stepscope.tui.views.format import file_size

_TICK_S = 0.2
_GONE_S = 10.0  # an engine that is silent for so long does not come back in this recording


def record(
    endpoint: str | None,
    file: str | None,
    seconds: float | None,
    rotate: str | None,
    keep: str | None,
    slo_itl: str | None = None,
    slo_ttft: str | None = None,
    past_s: float = 0.0,
    incidents: IncidentOptions | None = None,
    vary: str | None = None,
) -> None:
    """Record until a signal, `seconds` have passed, or the engine ends.

    Begins with up to `past_s` seconds of what was before, as far as the engine keeps them. A series
    of files (`rotate`) does not end with its engine: it waits for the next one. With `incidents`
    only what is around rules that fire is recorded. With `vary` (KNOB=LOW..HIGH) a knob of the
    engine moves for some seconds a minute.

    Raises:
        CommandFailed: the file cannot be written, or the engine vanished or started anew.
        Interrupted: a signal came before `seconds` had passed.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise WrongUsage(f"--seconds: expected a number above 0, got {seconds}")
    if incidents is not None:
        if file is not None or rotate is not None or past_s or vary is not None:
            raise WrongUsage("--incidents: not with --output, --rotate, --past or --vary")
        chosen = choose(endpoint, "stepscope record {} --incidents DIR")
        connect(chosen).close()
        incidents_command.keep_incidents(
            chosen, incidents, chosen_levels(level_flags(slo_itl, slo_ttft)), seconds
        )
        return
    if file is None:
        raise WrongUsage("name the file with --output, or a folder with --incidents")
    if keep is not None and rotate is None:
        raise WrongUsage("--keep: only with --rotate, which makes many files of one")
    check_past(past_s)
    levels = chosen_levels(level_flags(slo_itl, slo_ttft))
    limits = _limits("--rotate", rotate)
    kept = _limits("--keep", keep)
    output = output_path(file, is_new=limits is None)
    source = _source(endpoint, past_s)
    target = output if limits is None else FileSeries(output, limits, kept)
    stop = StopSignals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Signals wait from before there is a file that one could leave unfinished.
    with stop, _varied(endpoint, vary) as variation:
        recorder = Recorder(source, target, lambda: levels)
        source.start()
        try:
            with Progress() as progress:
                why = _watch(
                    source, recorder, stop, seconds, limits is not None, progress, variation
                )
        finally:
            source.stop()
            recorder.stop()
    if recorder.state == "failed":
        raise CommandFailed(recorder.error or f"{output} could not be written")
    remember(recorder.path)
    lost = f"{source.history.num_lost} messages lost"
    what = f"{recorder.path}: " if recorder.num_files == 1 else f"{recorder.num_files} files, "
    last = "" if recorder.num_files == 1 else f", the last one {recorder.path}"
    say(f"{what}{recorder.num_steps:,} steps, {file_size(recorder.num_bytes)}, {lost}{last}")
    if why is not None:
        raise type(why)(f"{why}; {recorder.path} holds what came before")
    if recorder.error is not None:  # the engine started anew: nothing records the new one
        raise CommandFailed(recorder.error)


def _source(endpoint: str | None, past_s: float) -> LiveSource:
    if endpoint is not None and is_metrics_url(endpoint):
        check_metrics(MetricsAddress.parse(endpoint))
        return receive(MetricsAddress.parse(endpoint), Journal())
    if endpoint is not None and endpoint.startswith(PREFIX):
        return receive(ForwardPassAddress.parse(endpoint), Journal())
    chosen = choose(endpoint, "stepscope record {} -o FILE")
    with connect(chosen) as client:
        if not publishes(client.info()):
            note = "publishes nothing (--no-telemetry): no step of it will be in the recording"
            print(f"stepscope: note: {chosen.name} {note}", file=sys.stderr)
    return Subscriber(chosen, Journal(), past_s=past_s)


@contextmanager
def _varied(endpoint: str | None, text: str | None) -> Iterator[KnobVariation | None]:
    """Of the option --vary; the knob has its own value again afterwards."""
    if text is None:
        yield None
        return
    try:
        knob = KnobRange.parse(text)
    except ValueError as error:
        raise WrongUsage(f"--vary: {error}") from error
    with connect(choose(endpoint, "stepscope record {} --vary KNOB=LOW..HIGH")) as client:
        variation = KnobVariation(client, knob, who())
        try:
            yield variation
        finally:
            variation.close()
            if variation.ended is not None:
                print(f"stepscope: note: {variation.ended}", file=sys.stderr)


def _limits(option: str, text: str | None) -> SeriesLimits | None:
    if text is None:
        return None
    try:
        limits = SeriesLimits.parse(text)
    except ValueError as error:
        raise WrongUsage(f"{option}: {error}") from error
    if option == "--rotate" and (limits.num_bytes or MIN_ROTATE_BYTES) < MIN_ROTATE_BYTES:
        raise WrongUsage(f"--rotate: expected {file_size(MIN_ROTATE_BYTES)} or more, got {text}")
    if option == "--rotate" and (limits.age_s or MIN_ROTATE_S) < MIN_ROTATE_S:
        raise WrongUsage(f"--rotate: expected {MIN_ROTATE_S:g} s or more, got {text}")
    return limits


def _watch(
    source: LiveSource,
    recorder: Recorder,
    stop: StopSignals,
    seconds: float | None,
    is_series: bool,
    progress: Progress,
    variation: KnobVariation | None,
) -> CommandFailed | None:
    """Wait for the end of the recording; return why it ended too early, if it did."""
    start_s = last_live_s = last_heard_s = time.monotonic()
    num_steps, is_joined = 0, False
    while not stop.wait(_TICK_S):
        now_s = time.monotonic()
        is_joined = is_joined or source.status == "live"
        if not is_joined and source.error is None:
            start_s = now_s  # `seconds` begin when all that was before has come
        if source.status in ("live", "stale") or recorder.num_steps > num_steps:
            last_live_s, num_steps = now_s, recorder.num_steps
        if source.status == "live":
            last_heard_s = now_s
        elapsed_s = now_s - start_s
        if variation is not None:
            variation.tick(elapsed_s)
        share = None if seconds is None else min(1.0, elapsed_s / seconds)
        written = f"{recorder.num_steps:,} steps, {file_size(recorder.num_bytes)}"
        if is_series:
            written += f", file {recorder.num_files}"
        what = "recording"
        if now_s - last_heard_s > _GONE_S:  # else it would seem to record for days
            what = "waiting for"
            written += f"; {source.error}"
        progress(f"{what} {source.name}", share, f"{elapsed_s:.0f} s, {written}")
        if recorder.state != "recording" or recorder.error is not None:
            return None
        if seconds is not None and elapsed_s >= seconds:
            return None
        if is_series:
            continue  # the next engine goes into the next file
        if source.history.state.state == "stopped":
            return None
        if now_s - last_live_s > _GONE_S:
            return CommandFailed(f"the engine no longer answers ({source.error})")
    elapsed_s = time.monotonic() - start_s
    if seconds is None or elapsed_s >= seconds:
        return None
    return Interrupted(f"interrupted after {elapsed_s:.0f} of {seconds:g} s")
