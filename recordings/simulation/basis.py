"""`WhatIfBasis`: what a forecast reads from a recording, namely requests, setup and step times.

`fit_recording` fits a model of step times on the steps of a recording.
"""

from collections.abc import Iterator
from typing import NamedTuple

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.protocol.wire import StepRecord
from stepscope.engine.simulation.fitted import FittedModel, SeenStep, fit
from stepscope.engine.simulation.step_time import shape_of_rows
from stepscope.engine.simulation.virtual.session import SimulatedSetup
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.moments import Progress
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.machine_speed import MachineSpeed, speed_of
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.recordings.state.series.latency import SLO

_MAX_BETWEEN_NS = 100_000_000  # a longer time between two steps is a pause, not engine work


def step_records(recording: Recording) -> Iterator[StepRecord]:
    """Yield all step records that can be read, in order."""
    for message, _, _, _ in messages(recording):
        if isinstance(message, StepRecord):
            yield message


def seen_steps(recording: Recording) -> Iterator[tuple[int, SeenStep]]:
    """Yield the steps whose batch was recorded.

    Yields:
        (time in ns at which the step's tokens were known, step)
    """
    before: StepRecord | None = None
    pads = bool(recording.info.simulated)
    for step in step_records(recording):
        if step.batch:
            seen = seen_step(step, before, pads=pads)
            if recording.info.overlap:  # overlap hides the host time of most steps
                seen = seen._replace(host_s=None)
            yield step.tokens_ns, seen
        before = step


def fit_recording(recording: Recording) -> FittedModel:
    """Fit a model of step times. Raises RecordingError: the steps are too few or too much alike."""
    try:
        return fit([seen for _, seen in seen_steps(recording)])
    except ConfigError as error:
        raise RecordingError(f"{recording.path}: {error}") from error


def seen_step(step: StepRecord, before: StepRecord | None, *, pads: bool = False) -> SeenStep:
    """Convert a step record to its shape and duration, on which a model of step times is fitted.

    The duration ends when the tokens of the step are known. It begins when `step` was scheduled, or
    when the tokens of `before` were known: if that is the previous step, the engine had work left
    after it, and the time between the two is too short for a pause.

    `pads`: whether the padding of a static batch took time, as in a simulated engine. Our own
    engine computes no padding.
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
    padded = (step.num_padded_tokens or 0) + (step.num_graph_padding or 0) if pads else 0
    return SeenStep(shape_of_rows(rows, padded), (step.tokens_ns - begin_ns) / 1e9, host_s)


_MIN_REQUESTS = 10


class WhatIfBasis(NamedTuple):
    # The engine to simulate, with the knobs in force when the recording began.
    setup: SimulatedSetup
    work: RecordedWork  # the recorded requests and knob changes
    model: FittedModel  # step times fitted on the recorded steps
    speed: MachineSpeed  # how the recorded step times deviated from `model`


def basis_of(
    recording: Recording, level: SLO, progress: Progress = lambda share: None
) -> WhatIfBasis:
    """Read from a recording what a forecast needs, and fit step times on its steps.

    Raises RecordingError: the recording is too short, lacks data that a simulation needs, or its
    steps are too much alike to fit a model.
    """
    path = recording.path
    work = recorded_work(recording, level, progress)
    if work.figures.num_requests < _MIN_REQUESTS:
        raise RecordingError(
            f"{path}: {work.figures.num_requests} requests arrived and finished in it, and a "
            f"forecast needs {_MIN_REQUESTS}: record longer, under load"
        )
    steps = [step for _, step in seen_steps(recording)]
    try:
        model = fit(steps)
    except ConfigError as error:
        raise RecordingError(f"{path}: {error}") from error
    info = recording.info
    setup = SimulatedSetup(
        model=model,
        simulated=f"fit on {path}",
        model_name=info.model,
        device=info.device or "unknown",
        knobs=work.knobs,
        limits=work.limits,
        num_blocks=work.num_blocks,
        block_size=work.block_size,
        overlap=work.overlap,
    )
    return WhatIfBasis(setup, work, model, speed_of(steps, model))
