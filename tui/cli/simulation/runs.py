"""What `stepscope simulate` simulates: the requests, step times, the engine, and one run of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.fitted import FittedModel
from stepscope.engine.simulation.gpus import gpu_named
from stepscope.engine.simulation.measured import MeasuredModel, read_points
from stepscope.engine.simulation.model_shape import model_shape
from stepscope.engine.simulation.roofline import RooflineModel, num_kv_tokens
from stepscope.engine.simulation.step_time import StepTimeModel
from stepscope.engine.simulation.virtual.cluster import Routing, run_cluster
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.engine.simulation.virtual.requests import (
    DrawnStepTimes,
    SimulatedRequest,
    of_mix,
    of_trace,
)
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.engine.workload.arrivals import describe
from stepscope.engine.workload.traces import read_trace
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.figures import RunFigures, RunSums
from stepscope.recordings.simulation.fitting import fit_recording
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.recording_path import RECORDING_SUFFIXES, find_recording
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

MIX = "mix"


class SimulatedSource(NamedTuple):
    """Requests to simulate, and where they come from.

    Attributes:
        text: where the requests come from, in words.
        recorded: the work of the recording, if they come from one.
    """

    text: str
    num_requests: int | None  # None if there is no end
    requests: Callable[[int], Iterable[SimulatedRequest]]  # makes the requests of a seed
    recorded: RecordedWork | None = None


def is_recording_name(source: str) -> bool:
    """Whether a source is a recording or a sample, by its name: not a mix, and not a trace."""
    path = Path(source)
    return source != MIX and (path.suffix in RECORDING_SUFFIXES or not path.exists())


def open_source(
    source: str, spec: WorkloadSpec, max_model_len: int, time_scale: float, limit: int | None
) -> SimulatedSource:
    """Open the requests that `source` names: `mix`, or a trace, a recording or a shipped sample.

    Raises:
        WrongUsage: an option cannot be used with the mix.
        TraceError, RecordingError, CommandFailed: the file cannot be read.
    """
    if source == MIX:
        return _mix(spec, max_model_len, limit)
    path = Path(source)
    if is_recording_name(source):
        with Recording(find_recording(source)) as recording:
            work = recorded_work(recording)
        requests = [
            each._replace(arrival_ns=round(each.arrival_ns * time_scale))
            for each in work.requests[:limit]
        ]
        return SimulatedSource(source, len(requests), lambda seed: requests, work)
    rows = read_trace(path, limit)
    requests = list(of_trace(rows, max_model_len, time_scale))
    return SimulatedSource(path.name, len(requests), lambda seed: requests)


def _mix(spec: WorkloadSpec, max_model_len: int, limit: int | None) -> SimulatedSource:
    if spec.max_concurrency is not None:
        raise WrongUsage(
            "--max-concurrency: a simulated mix sends every request at its time; leave it out"
        )
    num_requests = limit or spec.num_requests
    assert num_requests is not None, "the command has a default"

    def requests(seed: int) -> Iterable[SimulatedRequest]:
        given = {"seed": seed, "num_requests": num_requests}
        return of_mix(structs.replace(spec, **given), max_model_len)

    return SimulatedSource(describe(spec), num_requests, requests)


DEFAULT_MODEL = "llama-3.1-8b"


class ChosenStepTimes(NamedTuple):
    """A model of step times, and what is known of the engine whose step times it models."""

    model: StepTimeModel
    simulated: str  # a description in a few words
    model_name: str
    device: str
    num_kv_tokens: int | None  # room for tokens in the KV cache; None if unknown


def choose_step_times(
    gpu: str | None, model: str | None, step_time: str | None, tensor_parallel: int
) -> ChosenStepTimes:
    """Return the model that `--gpu`, `--model`, `--step-time` and `--tensor-parallel` ask for.

    Raises:
        WrongUsage: neither or both of `--gpu` and `--step-time` are given.
        ConfigError: the GPU or the model is unknown, or the file has no valid points.
    """
    if (gpu is None) == (step_time is None):
        raise WrongUsage("give either --gpu (such as h100) or --step-time (a file or a recording)")
    if gpu is not None:
        rates, shape = gpu_named(gpu), model_shape(model or DEFAULT_MODEL)
        roofline = RooflineModel(rates, shape, tensor_parallel)
        kv_tokens = num_kv_tokens(rates, shape, tensor_parallel)
        return ChosenStepTimes(
            roofline, f"{roofline.name}, by roofline", shape.name, rates.name, kv_tokens
        )
    assert step_time is not None
    return _of_file(step_time, model)


def _of_file(file: str, model: str | None) -> ChosenStepTimes:
    path = Path(file)
    if path.suffix in (".mcap", PART_SUFFIX) or not path.exists():
        return _of_recording(find_recording(file))
    try:
        fitted = msgspec.json.decode(path.read_bytes(), type=FittedModel)
    except (UnicodeDecodeError, msgspec.DecodeError):
        points = MeasuredModel(read_points(path, model))
        text = f"measured points of {path.name}"
        return ChosenStepTimes(points, text, model or "unknown", "unknown", None)
    return ChosenStepTimes(fitted, f"fit in {path.name}", model or "unknown", "unknown", None)


def _of_recording(path: Path) -> ChosenStepTimes:
    with Recording(path) as recording:
        info = recording.info
        fitted = fit_recording(recording)
    kv_tokens = info.num_blocks and info.block_size and info.num_blocks * info.block_size
    return ChosenStepTimes(
        fitted, f"fit on {path.name}", info.model, info.device or "unknown", kv_tokens
    )


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
