"""`WhatIfBasis`: what a forecast reads from a recording, namely requests, setup and step times."""

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.simulation.fitted import FittedModel, fit
from stepscope.engine.simulation.virtual.session import SimulatedSetup
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.moments import Progress
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.fitting import seen_steps
from stepscope.recordings.simulation.machine_speed import MachineSpeed, speed_of
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.recordings.state.series.latency import SLO

_MIN_REQUESTS = 10


class WhatIfBasis(NamedTuple):
    # The engine to simulate, with the knobs in force when the recording began.
    setup: SimulatedSetup
    work: RecordedWork  # the recorded requests and knob changes
    model: FittedModel  # step times fitted on the recorded steps
    speed: MachineSpeed  # how the recorded step times deviated from `model`


def basis_of(
    recording: Recording, levels: Sequence[SLO], progress: Progress = lambda share: None
) -> WhatIfBasis:
    """Read from a recording what a forecast needs, and fit step times on its steps.

    Raises RecordingError: the recording is too short, lacks data that a simulation needs, or its
    steps are too much alike to fit a model.
    """
    path = recording.path
    work = recorded_work(recording, levels, progress)
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
