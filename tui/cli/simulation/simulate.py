"""`stepscope simulate`: runs a workload through the real scheduler, with modelled step times."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.simulation.virtual.cluster import run_cluster
from stepscope.engine.simulation.virtual.requests import DrawnStepTimes
from stepscope.engine.simulation.virtual.session import SimulatedSession
from stepscope.recordings.file.service_levels import levels_of
from stepscope.recordings.simulation.writing import RecordingSink
from stepscope.recordings.state.series.latency import SLO
from stepscope.tui.cli.shared.options import AsJson, Like, argument, command, flag, option
from stepscope.tui.cli.shared.output import Progress, say, write_json
from stepscope.tui.cli.shared.paths import output_path
from stepscope.tui.cli.shared.signals import StopSignals
from stepscope.tui.cli.simulation.runs import (
    DEFAULT_MODEL,
    MIX,
    STDIN,
    EngineOptions,
    RunOptions,
    figure_lines,
    intervals,
    is_recording_name,
    levels_of_options,
    open_work,
    run_once,
)
from stepscope.tui.cli.simulation.schedule import cases_of, compare_cases, print_steps
from stepscope.tui.settings.cli_errors import Interrupted, WrongUsage
from stepscope.tui.settings.setting_values import resolve
from stepscope.tui.views.format import file_size

_DEFAULTS = {"rate": 8.0, "num_requests": 300}
_TICK_S = 0.1


@command(
    "stepscope simulate --gpu h100",
    "stepscope simulate mix --rate 8 --num-requests 500 --gpu h100",
    "stepscope simulate trace.csv --gpu h100 --model qwen3-8b --runs 5",
    "stepscope simulate trace.csv --gpu h100 --modes all",
    "stepscope simulate session.mcap -o again.mcap",
    "stepscope simulate chunked --sweep max_num_seqs=8..64 --runs 5",
    "stepscope simulate workload.json --steps | head",
    sections=("knobs", "load"),
    defaults=_DEFAULTS,
)
def simulate(
    source: str | None = argument(
        "TRACE|FILE|mix",
        "a trace (Azure CSV, Mooncake JSONL), a recording or sample, or 'mix': the load of the "
        "options below; with --steps a workload (.json, or - for stdin)  [default: mix]",
    ),
    gpu: str | None = option("NAME", "the GPU: h100, h200, a100, l40s, b200, mi300x, ..."),
    model: str | None = option(
        "NAME|PATH", "the model on it: a known name, or a config.json  [default: llama-3.1-8b]"
    ),
    step_time: str | None = option(
        "FILE",
        "instead of --gpu: how long steps take, from a recording, a saved fit, or points "
        "that were measured (bench_gpu.py's JSON, CSV); a recording has its own",
    ),
    tensor_parallel: int = option("INT", "GPUs that share the model", min=1, default=1),
    like: Like = None,
    num_blocks: int | None = option(
        "INT", "KV blocks (default: what the GPU has room for, or as recorded)", min=1
    ),
    block_size: int | None = option("INT", "tokens in a KV block  [default: 16]", min=1),
    max_model_len: int | None = option("INT", "longest request; longer ones are cut", min=2),
    overlap: Literal["on", "off"] | None = option(
        "on|off",
        "schedule each step while the one before it runs (default: as recorded; on with --like)",
    ),
    runs: int = option("INT", "runs, with seeds from --seed on", min=1, default=1),
    replicas: int = option("INT", "engines side by side", min=1, default=1),
    routing: Literal["round-robin", "least-loaded"] = option(
        "round-robin|least-loaded",
        "how requests are spread over the engines",
        default="round-robin",
    ),
    time_scale: float = option(
        "NUMBER", "multiply the arrivals' times: 0.5 doubles the load", default=1.0
    ),
    prints_steps: bool = flag(
        "of a workload that counts in steps: who would be in each, one JSON line a step", "--steps"
    ),
    modes: str | None = option("all|MODE,...", "a table of these batching modes"),
    sweep: str | None = option(
        "KNOB=FIRST..LAST|KNOB=VALUE,...", "a table of these values of a knob, in each of the modes"
    ),
    limit: int | None = option("INT", "take only so many requests from the start", min=1),
    output: str | None = option("FILE", "write the first run as a recording", "--output", "-o"),
    slo: list[str] | None = option(
        "LEVELS", "service levels to count goodput by ('ttft=500 itl=50'); may be given again"
    ),
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Run a workload on a GPU that is not here.

    The scheduler and the KV cache are the engine's own; only time is a model. A recording that is
    written opens everywhere (replay, compare, explain, plot) and is marked as simulated.

    --steps dry-runs the scheduler on a workload that counts in steps, without step times: a JSON
    object with num_blocks, requests (arrival_step, prompt_len, output_len each) and any knob by its
    name. Options override it, but its budget changes in mid-run still happen.
    """
    engine = EngineOptions(
        gpu, model, step_time, tensor_parallel, like, num_blocks, block_size, max_model_len,
        None if overlap is None else overlap == "on",
    )  # fmt: skip
    options = RunOptions(runs, replicas, routing, time_scale, limit)
    cases = cases_of(modes, sweep)
    if prints_steps:
        is_alone = not cases and output is None and runs == 1 and not as_json
        print_steps(source, engine, flags, is_alone=is_alone)
        return
    if source is not None and (source == STDIN or source.endswith(".json")):
        raise WrongUsage(f"{source} counts in steps: --steps prints who would be in each")
    if output is not None and cases:
        raise WrongUsage("--output: not with --modes or --sweep")
    is_alone = engine.gpu is None and engine.step_time is None
    if source is not None and is_alone and is_recording_name(source):
        engine = engine._replace(step_time=source)  # as fast as the recorded engine
    spec = resolve(WorkloadSpec, "load", flags, _DEFAULTS)
    levels = levels_of_options(slo or ()) or [SLO()]
    if cases:
        compare_cases(source or MIX, cases, engine, options, spec, levels, flags, as_json)
    else:
        _run(source, engine, options, output, spec, levels, as_json, flags)


def _run(
    source: str | None,
    engine: EngineOptions,
    options: RunOptions,
    output: str | None,
    spec: WorkloadSpec,
    levels: Sequence[SLO],
    as_json: bool,
    flags: Mapping[str, Any],
) -> None:
    path = None if output is None else output_path(output)
    if path is not None and options.num_replicas > 1:
        raise WrongUsage("--output: a recording is of one engine; leave out --replicas")
    work, setup = open_work(source or MIX, engine, options, spec, flags)
    seeds = [spec.seed + number for number in range(options.num_runs)]
    runs = []
    num_extrapolated = 0
    written = ""
    stop = StopSignals()
    with stop, Progress() as progress:

        def watch(what: str) -> Callable[[int], bool]:
            return _shown(progress, what, work.num_requests, stop)

        for seed in seeds:
            model = DrawnStepTimes(setup.model, seed)
            on_request = watch(f"simulating, seed {seed}")
            run = run_once(setup, model, work.requests(seed), levels, options, on_request)
            if stop:
                break
            runs.append(run)
            num_extrapolated += model.num_extrapolated
        if path is not None and not stop:
            with RecordingSink(path, levels_of(levels[0])) as sink:
                session = SimulatedSession(setup, seeds[0], sink)
                sink.begin(session.snapshot())
                on_request = watch(f"recording seed {seeds[0]}")
                run_cluster([session], work.requests(seeds[0]), on_request=on_request)
            written = f"{path} ({sink.num_steps:,} steps, {file_size(sink.num_bytes)})"
    if not runs:
        raise Interrupted("interrupted before a run was done")
    if as_json:
        document = {
            "simulated": setup.simulated,
            "model": setup.model_name,
            "work": work.text,
            "knobs": setup.knobs.as_dict(),
            "num_blocks": setup.num_blocks,
            "block_size": setup.block_size,
            "overlap": setup.overlap,
            "levels": [each._asdict() for each in levels],
            "seeds": seeds[: len(runs)],
            "runs": runs,
            "figures": {name: each._asdict() for name, each in intervals(runs).items()},
        }
        write_json(document)
    else:
        engines = "" if options.num_replicas == 1 else f", {options.num_replicas} engines"
        say(f"{setup.simulated}{engines}: {work.text}", *figure_lines(runs, levels))
        if source is None:
            has_model = engine.gpu is None or engine.model is not None
            default = "" if has_model else f", model {DEFAULT_MODEL} (--model)"
            say(
                f"chosen     a mix of {work.num_requests:,} requests (--num-requests, --rate; or a "
                f"trace or a recording){default}"
            )
        if num_extrapolated:
            say(f"note       {num_extrapolated:,} steps are unlike any the model has seen")
        if written:
            say(f"recording  {written}")
    if stop:
        raise Interrupted(f"interrupted after {len(runs)} of {len(seeds)} runs")


def _shown(
    progress: Progress, what: str, num_requests: int, stop: StopSignals
) -> Callable[[int], bool]:
    """Return a function for each request: it shows progress, and returns True after a signal."""
    next_s = 0.0

    def on_request(number: int) -> bool:
        nonlocal next_s
        if (now_s := time.monotonic()) >= next_s:
            next_s = now_s + _TICK_S
            detail = f"{number:,} of {num_requests:,} requests"
            progress(what, number / max(1, num_requests), detail)
        return bool(stop)

    return on_request
