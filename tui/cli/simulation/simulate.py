"""`stepscope simulate`: runs a workload through the real scheduler, with modelled step times."""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.simulation.virtual.cluster import Routing, run_cluster
from stepscope.engine.simulation.virtual.replica import Replica
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes, SimulatedRequest
from stepscope.engine.simulation.virtual.session import SimulatedSession
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.recordings.file.service_levels import levels_of
from stepscope.recordings.simulation.figures import RunFigures, RunSums
from stepscope.recordings.simulation.writing import RecordingSink
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.arguments import (
    AsJson,
    Like,
    example,
)
from stepscope.tui.cli.shared.errors import say
from stepscope.tui.cli.shared.options import with_options
from stepscope.tui.cli.shared.output_path import output_path
from stepscope.tui.cli.shared.progress import Progress
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.cli.simulation.report import intervals, levels_of_options, table
from stepscope.tui.cli.simulation.source import MIX, SimulatedSource, open_source
from stepscope.tui.cli.simulation.step_times import (
    DEFAULT_MODEL,
    ChosenStepTimes,
    choose_step_times,
)
from stepscope.tui.settings.cli_errors import Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags, resolve
from stepscope.tui.views.format import file_size

commands = typer.Typer(rich_markup_mode=None)


DEFAULT_LEN = 131_072
_DEFAULTS = {"rate": 8.0, "num_requests": 300}
_TICK_S = 0.1


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


@commands.command(
    epilog=example(
        "stepscope simulate --gpu h100",
        "stepscope simulate mix --rate 8 --num-requests 500 --gpu h100",
        "stepscope simulate trace.csv --gpu h100 --model qwen3-8b --runs 5",
        "stepscope simulate session.mcap --step-time session.mcap -o again.mcap",
    )
)
@with_options("knobs", "load", defaults=_DEFAULTS)
def simulate(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE|FILE|mix",
            help="a trace (Azure CSV, Mooncake JSONL), a recording or sample, or 'mix': the "
            "load of the options below  [default: mix]",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="the GPU: h100, h200, a100, l40s, b200, mi300x, ..."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="the model on it: a known name, or a config.json  [default: llama-3.1-8b]",
            show_default=False,
        ),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="instead of --gpu: how long steps take, from a recording, a saved fit, or points "
            "that were measured ('stepscope bench gpu --json', CSV)",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(metavar="INT", min=1, help="GPUs that share the model")
    ] = 1,
    like: Like = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            metavar="INT",
            min=1,
            help="KV blocks (default: what the GPU has room for, or as recorded)",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="INT", min=1, help="tokens in a KV block  [default: 16]")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="INT", min=2, help="longest request; longer ones are cut"),
    ] = None,
    overlap: Annotated[
        Literal["on", "off"] | None,
        typer.Option(
            metavar="on|off",
            help="schedule each step while the one before it runs (default: as recorded; on with "
            "--like)",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option(metavar="INT", min=1, help="runs, with seeds from --seed on")
    ] = 1,
    replicas: Annotated[int, typer.Option(metavar="INT", min=1, help="engines side by side")] = 1,
    routing: Annotated[
        Literal["round-robin", "least-loaded"],
        typer.Option(
            metavar="round-robin|least-loaded", help="how requests are spread over the engines"
        ),
    ] = "round-robin",
    time_scale: Annotated[
        float,
        typer.Option(metavar="NUMBER", help="multiply the arrivals' times: 0.5 doubles the load"),
    ] = 1.0,
    limit: Annotated[
        int | None,
        typer.Option(metavar="INT", min=1, help="take only so many requests from the start"),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="write the first run as a recording"),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVELS",
            help="service levels to count goodput by ('ttft=500 itl=50'); may be given again",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Run a workload on a GPU that is not here.

    The scheduler and the KV cache are the engine's own; only time is a model. A recording that is
    written opens everywhere (replay, compare, explain, plot) and is marked as simulated.
    """
    engine = EngineOptions(
        gpu,
        model,
        step_time,
        tensor_parallel,
        like,
        num_blocks,
        block_size,
        max_model_len,
        None if overlap is None else overlap == "on",
    )
    options = RunOptions(runs, replicas, routing, time_scale, limit)
    run_workload(source, engine, options, output, slo or (), as_json, flags)


def run_workload(
    source: str | None,
    engine: EngineOptions,
    options: RunOptions,
    output: str | None,
    slos: Sequence[str],
    as_json: bool,
    flags: Mapping[str, Any],
) -> None:
    """Simulate the runs and print their figures.

    Args:
        source: a trace, a recording, or `mix`; None: the default mix, and the output says so.
        output: also write the first run as a recording.

    Raises:
        WrongUsage: an option is not valid.
        Interrupted: a signal ended the command early. The figures cover the complete runs, and a
            recording that was begun holds what came before.
    """
    path = None if output is None else output_path(output)
    if path is not None and options.num_replicas > 1:
        raise WrongUsage("--output: a recording is of one engine; leave out --replicas")
    levels = levels_of_options(slos) or [SLO()]
    spec = resolve(WorkloadSpec, "load", flags, _DEFAULTS)
    chosen = choose_step_times(engine.gpu, engine.model, engine.step_time, engine.tensor_parallel)
    num_slots = (engine.num_blocks or 0) * (engine.block_size or 16) or chosen.num_kv_tokens
    longest = engine.max_model_len or min(DEFAULT_LEN, num_slots or DEFAULT_LEN)
    work = open_source(source or MIX, spec, longest, options.time_scale, options.limit)
    setup = make_setup(engine, chosen, work, convert_flags(Knobs, flags))
    seeds = [spec.seed + number for number in range(options.num_runs)]
    runs: list[RunFigures] = []
    num_extrapolated = 0
    written: str | None = None
    stop = StopSignals(signal.SIGINT, signal.SIGTERM)
    with stop, Progress() as progress:
        for seed in seeds:
            watch = _Watch(progress, f"simulating, seed {seed}", work.num_requests, stop)
            model = DrawnStepTimes(setup.model, seed)
            run = run_once(setup, model, work.requests(seed), levels, options, watch)
            if stop:
                break
            runs.append(run)
            num_extrapolated += model.num_extrapolated
        if path is not None and not stop:
            watch = _Watch(progress, f"recording seed {seeds[0]}", work.num_requests, stop)
            written = _record(path, setup, seeds[0], work, levels[0], watch)
    if not runs:
        raise Interrupted("interrupted before a run was done")
    if as_json:
        say(_document(setup, work, seeds[: len(runs)], runs, levels))
    else:
        engines = "" if options.num_replicas == 1 else f", {options.num_replicas} engines"
        say(f"{setup.simulated}{engines}: {work.text}", *table(runs, levels))
        if source is None:
            has_model = engine.gpu is None or engine.model is not None
            default = "" if has_model else f", model {DEFAULT_MODEL} (--model)"
            say(
                f"chosen     a mix of {work.num_requests:,} requests (--num-requests, --rate; or a "
                f"trace or a recording){default}"
            )
        if num_extrapolated:
            say(f"note       {num_extrapolated:,} steps are unlike any the model has seen")
    if written is not None and not as_json:
        say(f"recording  {path} ({written})")
    if stop:
        raise Interrupted(f"interrupted after {len(runs)} of {len(seeds)} runs")


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


def _record(
    path: Path,
    setup: SimulatedSetup,
    seed: int,
    work: SimulatedSource,
    level: SLO,
    on_request: Callable[[int], bool],
) -> str:
    """Simulate the run of one seed and write it to a file.

    Returns a text on what the file holds.
    """
    with RecordingSink(path, levels_of(level)) as sink:
        session = SimulatedSession(setup, seed, sink)
        sink.begin(session.snapshot())
        run_cluster([session], work.requests(seed), on_request=on_request)
    return f"{sink.num_steps:,} steps, {file_size(sink.num_bytes)}"


class _Watch:
    """A function to call at each request.

    It shows progress, and returns True if the run must stop.
    """

    def __init__(
        self, progress: Progress, what: str, num_requests: int | None, stop: StopSignals
    ) -> None:
        self._progress = progress
        self._what = what
        self._num_requests = num_requests
        self._stop = stop
        self._next_s = 0.0

    def __call__(self, number: int) -> bool:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _TICK_S
            share = None if not self._num_requests else number / self._num_requests
            self._progress(self._what, share, f"{number:,} requests")
        return bool(self._stop)


def _document(
    setup: SimulatedSetup,
    work: SimulatedSource,
    seeds: Sequence[int],
    runs: Sequence[RunFigures],
    levels: Sequence[SLO],
) -> str:
    document = {
        "simulated": setup.simulated,
        "model": setup.model_name,
        "work": work.text,
        "knobs": setup.knobs.as_dict(),
        "num_blocks": setup.num_blocks,
        "block_size": setup.block_size,
        "overlap": setup.overlap,
        "levels": [each._asdict() for each in levels],
        "seeds": list(seeds),
        "runs": list(runs),
        "figures": {name: each._asdict() for name, each in intervals(runs).items()},
    }
    return msgspec.json.encode(document).decode()
