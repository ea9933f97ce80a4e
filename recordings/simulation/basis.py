"""`WhatIfBasis`: all data of a recording that a forecast needs."""

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.simulation.fitted import FittedModel, fit
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.moments import Progress
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.fitting import seen_steps
from stepscope.recordings.simulation.machine_speed import MachineSpeed, speed_of
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.recordings.state.series.latency import SLO

_MIN_REQUESTS = 10


class WhatIfBasis(NamedTuple):
    """The recorded requests, the engine's setup, and step times fitted on its steps."""

    setup: SimulatedSetup
    work: RecordedWork
    model: FittedModel
    speed: MachineSpeed


def basis_of(
    recording: Recording, levels: Sequence[SLO], progress: Progress = lambda share: None
) -> WhatIfBasis:
    """Read the basis of a forecast from a recording.

    Raises:
        RecordingError: the recording is too short, or its steps are too much alike.
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
