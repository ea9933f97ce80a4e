"""`WhatIfBasis`: what a forecast reads from a recording, namely requests, setup and step times.

`fit_recording` fits a model of step times on the steps of a recording. `MachineSpeed`: how they
deviated from their fit, to simulate a machine like that.

Slow steps come together, because their cause (another process, a hot processor) lasts for more than
one step. So the recorded step time is divided into windows of one second. A simulated session
repeats stretches of consecutive windows, each with its recorded mean deviation, and draws the
deviation of each step within a window at random. The session as a whole is also faster or slower
by a random factor with the spread of the windows.
"""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.wire import StepRecord
from stepscope.engine.simulation.step_time import StepShape, StepTime, StepTimeModel, shape_of_rows
from stepscope.engine.simulation.virtual_session import SimulatedSetup
from stepscope.recordings.errors import TooLittleData
from stepscope.recordings.export.moments import Progress
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.session.regression import LEAST_S, FittedModel, SeenStep, fit
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.recordings.state.latency import SLO

_MAX_BETWEEN_NS = 100_000_000  # a longer time between two steps is a pause, not engine work


def step_records(recording: Recording) -> Iterator[StepRecord]:
    for message, _, _, _ in messages(recording):
        if isinstance(message, StepRecord):
            yield message


def seen_steps(recording: Recording) -> Iterator[SeenStep]:
    """Yield the steps whose batch was recorded."""
    before: StepRecord | None = None
    pads = bool(recording.info.simulated)
    for step in step_records(recording):
        if step.batch:
            seen = seen_step(step, before, pads=pads)
            if recording.info.overlap:  # overlap hides the host time of most steps
                seen = seen._replace(host_s=None)
            yield seen
        before = step


def fit_recording(recording: Recording, steps: Sequence[SeenStep] = ()) -> FittedModel:
    """Fit a model of step times. Raises TooLittleData: the steps are too few or too much alike.

    `steps`: those of `seen_steps`, if they are known already.
    """
    try:
        return fit(steps or list(seen_steps(recording)))
    except ConfigError as error:
        raise TooLittleData(f"{recording.path}: {error}") from error


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
    if (
        before is not None
        and before.step + 1 == step.step
        and before.num_running + before.num_waiting > 0
        and begin_ns - before.tokens_ns < _MAX_BETWEEN_NS
    ):
        begin_ns = before.tokens_ns
    host_s = None
    if step.launch_ns is not None and step.hidden_ns is None:
        host_s = (step.launch_ns - begin_ns) / 1e9
    padded = (step.num_padded_tokens or 0) + (step.num_graph_padding or 0) if pads else 0
    return SeenStep(shape_of_rows(rows, padded), (step.tokens_ns - begin_ns) / 1e9, host_s)


_WINDOW_S = 1.0  # step time in a window, without idle time
_STRETCH = 4  # consecutive windows that are drawn together


class MachineSpeed(NamedTuple):
    """Deviations of step times from the fit, as logarithms of actual divided by fitted time."""

    windows: tuple[float, ...]  # the deviation of each window as a whole, in the order recorded
    # Deviations of steps that only decode, relative to their window, in ascending order.
    decodes: tuple[float, ...]
    # Deviations of steps with prefill, relative to their window, in ascending order.
    prefills: tuple[float, ...]

    @property
    def drift(self) -> float:
        return statistics.stdev(self.windows)


class MachineStepTimes:
    """A `StepTimeModel`: another model's times, with the deviations of the recorded machine."""

    def __init__(self, model: StepTimeModel, speed: MachineSpeed, seed: int) -> None:
        # Steps so far whose shape is unlike all shapes that the model was fitted on.
        self.num_extrapolated = 0
        self._model = model
        self._speed = speed
        self._random = random.Random(seed)
        self._session = self._random.gauss(0.0, speed.drift)
        self._stretch: Iterator[float] = iter(())
        self._scale = 1.0
        self._left_s = 0.0  # seconds left in the window

    def step_time(self, shape: StepShape) -> StepTime:
        device_s, host_s, _, is_extrapolated = self._model.step_time(shape)
        self.num_extrapolated += is_extrapolated
        if self._left_s <= 0:
            self._next_window()
        own = self._speed.prefills if shape.num_prefill_tokens else self._speed.decodes
        factor = self._scale * math.exp(self._random.choice(own) if own else 0.0)
        self._left_s -= (device_s + host_s) * factor
        return StepTime(device_s * factor, host_s * factor, 0.0, is_extrapolated)

    def _next_window(self) -> None:
        windows = self._speed.windows
        log_scale = next(self._stretch, None)
        if log_scale is None:
            begin = self._random.randrange(len(windows))
            self._stretch = (windows[(begin + at) % len(windows)] for at in range(_STRETCH))
            log_scale = next(self._stretch)
        self._scale = math.exp(self._session + log_scale)
        self._left_s = _WINDOW_S


def speed_of(steps: Sequence[SeenStep], model: FittedModel) -> MachineSpeed:
    """Measure how far the durations of `steps` deviate from `model`.

    Raises TooLittleData: the engine was busy for too short a time to measure the drift.
    """
    windows: list[float] = []
    decodes: list[float] = []
    prefills: list[float] = []
    for window in _windows(steps):
        fitted = [model.step_time(step.shape).cycle_s for step in window]
        log_scale = math.log(sum(step.cycle_s for step in window) / sum(fitted))
        windows.append(log_scale)
        for step, fitted_s in zip(window, fitted, strict=True):
            own = prefills if step.shape.num_prefill_tokens else decodes
            own.append(math.log(step.cycle_s / fitted_s) - log_scale)
    if len(windows) * _WINDOW_S < LEAST_S:
        raise TooLittleData(
            f"the engine was busy for less than {LEAST_S:g} s, too little for a "
            "forecast: record longer, under load"
        )
    return MachineSpeed(tuple(windows), tuple(sorted(decodes)), tuple(sorted(prefills)))


def _windows(steps: Sequence[SeenStep]) -> Iterator[list[SeenStep]]:
    window: list[SeenStep] = []
    seconds = 0.0
    for step in steps:
        if step.cycle_s <= 0:
            continue
        window.append(step)
        seconds += step.cycle_s
        if seconds >= _WINDOW_S:
            yield window
            window, seconds = [], 0.0


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

    Raises RecordingError: the recording lacks data that a simulation needs; TooLittleData: it is
    too short, or its steps are too much alike to fit a model.
    """
    path = recording.path
    work = recorded_work(recording, level, progress)
    if work.figures.num_requests < _MIN_REQUESTS:
        raise TooLittleData(
            f"{path}: {work.figures.num_requests} requests arrived and finished in it, and a "
            f"forecast needs {_MIN_REQUESTS}: record longer, under load"
        )
    steps = list(seen_steps(recording))
    model = fit_recording(recording, steps)
    info = recording.info
    setup = SimulatedSetup(
        model=model, simulated=f"fit on {path}", model_name=info.model,
        device=info.device or "unknown", knobs=work.knobs, limits=work.limits,
        num_blocks=work.num_blocks, block_size=work.block_size, overlap=work.overlap,
    )  # fmt: skip
    return WhatIfBasis(setup, work, model, speed_of(steps, model))
