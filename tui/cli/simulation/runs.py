"""The engine and the runs that `stepscope simulate` is asked for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.virtual.cluster import Routing, run_cluster
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes, SimulatedRequest
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.recordings.simulation.figures import RunFigures, RunSums
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.simulation.source import SimulatedSource, open_source
from stepscope.tui.cli.simulation.step_times import ChosenStepTimes, choose_step_times
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

DEFAULT_LEN = 131_072


class EngineOptions(NamedTuple):
    """The engine to simulate, as the user typed it."""

    gpu: str | None = None
    model: str | None = None
    step_time: str | None = None
    tensor_parallel: int = 1
    like: str | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    overlap: bool | None = None


class RunOptions(NamedTuple):
    """How to simulate: the number of runs and of engines, routing, and which requests."""

    num_runs: int = 1
    num_replicas: int = 1
    routing: Routing = "round-robin"
    time_scale: float = 1.0
    limit: int | None = None


def open_work(
    source: str,
    engine: EngineOptions,
    options: RunOptions,
    spec: WorkloadSpec,
    flags: Mapping[str, Any],
) -> tuple[SimulatedSource, SimulatedSetup]:
    """Return the requests to simulate, and the engine that serves them.

    Raises:
        WrongUsage: an option is not valid, or is missing.
        TraceError, RecordingError, CommandFailed: the file cannot be read.
    """
    chosen = choose_step_times(engine.gpu, engine.model, engine.step_time, engine.tensor_parallel)
    num_slots = (engine.num_blocks or 0) * (engine.block_size or 16) or chosen.num_kv_tokens
    longest = engine.max_model_len or min(DEFAULT_LEN, num_slots or DEFAULT_LEN)
    work = open_source(source, spec, longest, options.time_scale, options.limit)
    return work, make_setup(engine, chosen, work, convert_flags(Knobs, flags))


def make_setup(
    engine: EngineOptions,
    chosen: ChosenStepTimes,
    work: SimulatedSource,
    knob_flags: Mapping[str, Any],
) -> SimulatedSetup:
    """Return the engine to simulate, from the options.

    If the requests come from a recording, what the options leave open is as recorded.

    Raises:
        WrongUsage: the size of the KV cache is unknown.
        ConfigError: the knobs do not go together.
    """
    recorded = work.recorded
    preset = None if engine.like is None else defaults_like(engine.like)
    like = {} if preset is None else preset.knobs
    knobs = Knobs() if recorded is None else recorded.knobs
    knobs = msgspec.structs.replace(knobs, **{**like, **knob_flags})
    block_size = engine.block_size or (recorded.block_size if recorded else 16)
    num_blocks = engine.num_blocks
    if num_blocks is None and recorded is not None and engine.gpu is None:
        num_blocks = recorded.num_blocks
    if num_blocks is None and chosen.num_kv_tokens is not None:
        num_blocks = chosen.num_kv_tokens // block_size
    if num_blocks is None:
        raise WrongUsage("give --num-blocks: these step times do not say how large the KV cache is")
    longest = engine.max_model_len or (recorded.limits.max_model_len if recorded else DEFAULT_LEN)
    longest = min(longest, num_blocks * block_size)
    overlap = engine.overlap
    if overlap is None:
        overlap = preset is not None or (recorded is not None and recorded.overlap)
    return SimulatedSetup(
        model=chosen.model,
        simulated=chosen.simulated + (", steps overlap" if overlap else ""),
        model_name=chosen.model_name,
        device=chosen.device,
        knobs=knobs,
        limits=Limits(
            max_num_batched_tokens=max(8192, longest, knobs.max_num_batched_tokens),
            max_num_seqs=max(256, knobs.max_num_seqs),
            max_model_len=longest,
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        overlap=overlap,
        work=work.text,
    )


def run_once(
    setup: SimulatedSetup,
    model: DrawnStepTimes,
    requests: Iterable[SimulatedRequest],
    levels: Sequence[SLO],
    options: RunOptions,
    on_request: Callable[[int], bool] = lambda number: False,
) -> RunFigures:
    """Simulate one run and return its figures. The steps are not kept."""
    figures = RunSums(levels)
    replicas = [
        Replica(setup.scheduler(), model, figures, overlap=setup.overlap)
        for _ in range(options.num_replicas)
    ]
    run_cluster(replicas, requests, routing=options.routing, on_request=on_request)
    return figures.result()
