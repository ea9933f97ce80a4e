"""Step times learned from the steps of a recording."""

from collections.abc import Iterator

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.protocol.wire import StepRecord
from stepscope.engine.simulation.fitted import FittedModel, SeenStep, fit
from stepscope.engine.simulation.step_time import shape_of_rows
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Position, Recording

_MAX_BETWEEN_NS = 100_000_000  # more between two steps is no work of the engine: it was paused


def step_records(recording: Recording) -> Iterator[StepRecord]:
    """All that can be read, in order."""
    for frame, _ in recording.frames(Position(0, 0)):
        if frame.topic != StepRecord.topic:
            continue
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError:
            continue  # 'stepscope verify' tells of it
        if isinstance(message, StepRecord):
            yield message


def seen_steps(recording: Recording) -> Iterator[tuple[int, SeenStep]]:
    """Each step whose rows are known, with the time of its tokens."""
    before: StepRecord | None = None
    pads = bool(recording.info.simulated)
    for step in step_records(recording):
        if step.batch:
            seen = seen_step(step, before, pads=pads)
            if recording.info.overlap:  # what the host took of a cycle is hidden in most of them
                seen = seen._replace(host_s=None)
            yield step.tokens_ns, seen
        before = step


def fit_recording(recording: Recording) -> FittedModel:
    """Raises RecordingError when the steps are too few, or too much alike."""
    try:
        return fit([seen for _, seen in seen_steps(recording)])
    except ConfigError as error:
        raise RecordingError(f"{recording.path}: {error}") from error


def seen_step(step: StepRecord, before: StepRecord | None, *, pads: bool = False) -> SeenStep:
    """A step as a model is fitted on it.

    Args:
        before: the step before it, whose end begins this one if nothing was missing between, even
            where this one was scheduled ahead.
        pads: the padding of a static batch took time, as a simulated engine counts it. Our own
            engine computes none.
    """
    rows = [(row.phase, row.start, row.num_tokens) for row in step.batch or ()]
    begin_ns = step.schedule_start_ns
    is_next = before is not None and before.step + 1 == step.step
    if (
        is_next
        and before is not None
        and before.num_running + before.num_waiting > 0
        and begin_ns - before.tokens_ns < _MAX_BETWEEN_NS
    ):
        begin_ns = before.tokens_ns
    host_s = None
    if step.launch_ns is not None and step.hidden_ns is None:
        host_s = (step.launch_ns - begin_ns) / 1e9
    padded = (step.num_padded_tokens or 0) if pads else 0
    return SeenStep(shape_of_rows(rows, padded), (step.tokens_ns - begin_ns) / 1e9, host_s)
