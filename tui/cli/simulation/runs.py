"""What `stepscope simulate` simulates: the requests, step times, the engine; figures of its runs.

A figure of several runs is an `Interval`: the median over the seeds, the lowest and the highest.
`simulated_engine` is the process of an engine that `demo --simulate` starts.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from msgspec import structs

from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.measured import MeasuredModel, read_points
from stepscope.engine.simulation.model_shape import model_shape
from stepscope.engine.simulation.roofline import RooflineModel, gpu_named, num_kv_tokens
from stepscope.engine.simulation.step_time import StepTimeModel
from stepscope.engine.simulation.virtual_requests import SimulatedRequest, of_mix, of_trace
from stepscope.engine.simulation.virtual_session import SimulatedSetup
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.workload.arrivals import describe
from stepscope.engine.workload.traces import read_trace
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.basis import fit_recording
from stepscope.recordings.simulation.figures import RANKS, RunFigures, flat
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.shared.arguments import RECORDING_SUFFIXES, find_recording
from stepscope.tui.cli.shared.options import command
from stepscope.tui.cli.shared.process import end_process, prepare_process, when_parent_ends
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import convert_flags, said
from stepscope.tui.settings.settings import DashboardSettings

MIX = "mix"
DEFAULT_MODEL = "llama-3.1-8b"
LONGEST = 131_072
_KINDS = ("ttft", "itl", "e2e")


class SimulatedSource(NamedTuple):
    """Requests to simulate, and where they come from, in words; of a recording with its work."""

    text: str
    num_requests: int
    requests: Callable[[int], Iterable[SimulatedRequest]]  # makes the requests of a seed
    recorded: RecordedWork | None = None


class ChosenStepTimes(NamedTuple):
    model: StepTimeModel
    simulated: str  # a description in a few words
    model_name: str
    device: str = "unknown"
    num_kv_tokens: int | None = None  # room for tokens in the KV cache; None if unknown


class EngineOptions(NamedTuple):
    gpu: str | None = None
    model: str | None = None
    step_time: str | None = None
    tensor_parallel: int = 1
    like: str | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    overlap: bool | None = None


def is_recording_name(source: str) -> bool:
    """Whether a source is a recording or a sample, by its name: not a mix, and not a trace."""
    path = Path(source)
    return source != MIX and (path.suffix in RECORDING_SUFFIXES or not path.exists())


def open_source(
    source: str, spec: WorkloadSpec, max_model_len: int, time_scale: float, limit: int | None
) -> SimulatedSource:
    """Open the requests that `source` names: `mix`, or a trace, a recording or a shipped sample."""
    if source == MIX:
        if spec.max_concurrency is not None:
            raise WrongUsage(
                "--max-concurrency: a simulated mix sends every request at its time; leave it out"
            )
        number = limit or spec.num_requests
        assert number is not None, "the command has a default"
        mix = structs.replace(spec, num_requests=number)
        return SimulatedSource(
            describe(spec),
            number,
            lambda seed: of_mix(structs.replace(mix, seed=seed), max_model_len),
        )
    if not is_recording_name(source):
        rows = list(of_trace(read_trace(Path(source), limit), max_model_len, time_scale))
        return SimulatedSource(Path(source).name, len(rows), lambda seed: rows)
    with Recording(find_recording(source)) as recording:
        work = recorded_work(recording, SLO())
    requests = [
        each._replace(arrival_ns=round(each.arrival_ns * time_scale))
        for each in work.requests[:limit]
    ]
    return SimulatedSource(source, len(requests), lambda seed: requests, work)


def choose_step_times(engine: EngineOptions) -> ChosenStepTimes:
    gpu, model, step_time = engine.gpu, engine.model, engine.step_time
    if (gpu is None) == (step_time is None):
        raise WrongUsage("give either --gpu (such as h100) or --step-time (a file or a recording)")
    if gpu is not None:
        rates, shape = gpu_named(gpu), model_shape(model or DEFAULT_MODEL)
        roofline = RooflineModel(rates, shape, engine.tensor_parallel)
        kv_tokens = num_kv_tokens(rates, shape, engine.tensor_parallel)
        text = f"{roofline.name}, by roofline"
        return ChosenStepTimes(roofline, text, shape.name, rates.name, kv_tokens)
    assert step_time is not None
    if is_recording_name(step_time):
        with Recording(find_recording(step_time)) as recording:
            info, text = recording.info, f"fit on {recording.path.name}"
            fitted = fit_recording(recording)
        num_slots = info.kv_tokens
        if num_slots is None and info.kv_groups is None:
            num_slots = info.num_blocks and info.block_size and info.num_blocks * info.block_size
        return ChosenStepTimes(fitted, text, info.model, info.device or "unknown", num_slots)
    path, name = Path(step_time), model or "unknown"
    points = MeasuredModel(read_points(path))
    return ChosenStepTimes(points, f"measured points of {path.name}", name)


def setup_of(
    engine: EngineOptions,
    chosen: ChosenStepTimes,
    knob_flags: Mapping[str, Any],
    work: str = "",
    recorded: RecordedWork | None = None,
) -> SimulatedSetup:
    """Return the engine to simulate. What the options leave open is as in the recording, if any."""
    preset = None if engine.like is None else defaults_like(engine.like)
    knobs = Knobs() if recorded is None else recorded.knobs
    knobs = structs.replace(knobs, **{**(preset.knobs if preset else {}), **knob_flags})
    block_size = engine.block_size or (recorded.block_size if recorded else 16)
    num_blocks = engine.num_blocks
    if num_blocks is None and recorded is not None and engine.gpu is None:
        num_blocks = recorded.num_blocks
    if num_blocks is None and chosen.num_kv_tokens is not None:
        num_blocks = chosen.num_kv_tokens // block_size
    if num_blocks is None:
        raise WrongUsage("give --num-blocks: these step times do not say how large the KV cache is")
    longest = engine.max_model_len or (recorded.limits.max_model_len if recorded else LONGEST)
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
        work=work,
    )


# Figures


class Interval(NamedTuple):
    """Median, lowest and highest value of a figure over the runs; all None without any value."""

    median: float | None = None
    low: float | None = None
    high: float | None = None

    def text(self, form: str) -> str:
        """Return the median, with lowest and highest value if these look different from it."""
        if self.median is None:
            return "unknown"
        shown, lowest, highest = (format(value, form) for value in self)
        return shown if lowest == highest else f"{shown} ({lowest} to {highest})"


def intervals(runs: Sequence[RunFigures]) -> dict[str, Interval]:
    """Return name -> median, lowest and highest value of each figure over the runs."""
    flats = [flat(run) for run in runs]
    for each, run in zip(flats, runs, strict=True):
        each |= {f"{kind}_max_ms": getattr(run, f"{kind}_ms").max for kind in _KINDS}
    found = {}
    for name in flats[0]:
        known = sorted(value for each in flats if (value := each[name]) is not None)
        found[name] = (
            Interval(statistics.median(known), known[0], known[-1]) if known else Interval()
        )
    return found


def figure_lines(runs: Sequence[RunFigures], level: SLO) -> Iterator[str]:
    found, first = intervals(runs), runs[0]

    def text(name: str, form: str) -> str:
        return found[name].text(form)

    yield (
        f"requests   {first.num_requests:,} in {first.seconds:,.1f} s of virtual time "
        f"({text('requests_per_s', '.2f')}/s), {text('num_steps', ',.0f')} steps"
    )
    yield (
        f"tokens     out {text('output_tokens_per_s', ',.0f')}/s, prefill "
        f"{text('prefill_tokens_per_s', ',.0f')}/s, prefix hits {text('hit_share', '.1%')}"
    )
    yield f"preempted  {text('num_preemptions', ',.0f')}"
    for kind in _KINDS:
        ranks = [*(f"p{rank}" for rank in RANKS), "max"]
        cells = [f"{rank} {text(f'{kind}_{rank}_ms', ',.1f')} ms" for rank in ranks]
        yield f"{kind.upper():<10} {'  '.join(cells)}"
    yield f"goodput    {text('goodput_per_s', '.2f')} requests/s keep {said(level)} in every gap"


# The engine of `demo --simulate` and `tour --simulate`, a process of its own

_MAX_LEN = 32_768


@command(sections=("knobs", "levels"), hidden=True)
def simulated_engine(
    endpoint: Annotated[str, typer.Option()],
    gpu: Annotated[str | None, typer.Option()] = None,
    step_time: Annotated[str | None, typer.Option()] = None,
    model: Annotated[str | None, typer.Option()] = None,
    num_blocks: Annotated[int | None, typer.Option()] = None,
    speed: Annotated[float, typer.Option()] = 1.0,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """The engine of 'stepscope demo --simulate' and 'stepscope tour --simulate'."""
    from stepscope.engine.process.simulated import serve_simulated  # no other command needs it

    prepare_process()
    levels = convert_flags(DashboardSettings, flags)
    if exit_with_stdin:
        when_parent_ends(end_process)
    engine = EngineOptions(gpu, model, step_time, num_blocks=num_blocks, max_model_len=_MAX_LEN)
    setup = setup_of(engine, choose_step_times(engine), convert_flags(Knobs, flags))
    setup = structs.replace(setup, **levels)
    serve_simulated(setup, Endpoint.parse(endpoint), speed, 0, lambda info: None)
