"""Commands that simulate an engine instead of running a model."""

from typing import Annotated, Any, Literal

import typer

from stepscope.tui.cli.shared.options import with_options
from stepscope.tui.cli.table.shared import (
    AsJson,
    Like,
    example,
)

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog=example(
        "stepscope simulate --gpu h100",
        "stepscope simulate mix --rate 8 --num-requests 500 --gpu h100",
        "stepscope simulate trace.csv --gpu h100 --model qwen3-8b --runs 5",
        "stepscope simulate session.mcap --step-time session.mcap -o again.mcap",
    )
)
@with_options("knobs", "load")
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
    from stepscope.tui.cli.simulation import simulate as command

    engine = command.EngineOptions(
        gpu, model, step_time, tensor_parallel, like, num_blocks, block_size, max_model_len,
        None if overlap is None else overlap == "on",
    )  # fmt: skip
    options = command.RunOptions(runs, replicas, routing, time_scale, limit)
    command.simulate(source, engine, options, output, slo or (), as_json, flags)


@commands.command(
    epilog=example(
        "stepscope schedule workload.json --batching static --summary",
        "stepscope schedule workload.json --max-num-batched-tokens 256 | head",
        "stepscope schedule trace.csv --summary --modes all --gpu h100",
        "stepscope schedule chunked --summary --sweep max_num_seqs=8..64 --runs 5",
    )
)
@with_options("knobs")
def schedule(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="a workload (JSON), a trace, a recording or sample, or - for stdin"
        ),
    ],
    summary: Annotated[
        bool, typer.Option("--summary", help="print a summary instead of the steps")
    ] = False,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="all|MODE,...", help="with --summary: a table of these batching modes"
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KNOB=FIRST..LAST", help="with --summary: a line for each of some values"
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            metavar="INT",
            min=1,
            help="of a trace or a recording: runs, with seeds from 0 on",
            show_default=False,
        ),
    ] = 1,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="times in ms on this GPU (h100, a100, ...)")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="... of this model")
    ] = None,
    step_time: Annotated[
        str | None, typer.Option(metavar="FILE", help="times in ms, as in 'stepscope simulate'")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(metavar="INT", help="number of KV blocks; one of them is never used"),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="INT", help="tokens in a KV block")
    ] = None,
    like: Like = None,
    as_json: Annotated[bool, typer.Option("--json", help="with --summary: print JSON")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Dry-run the scheduler, without a model: one JSON line a step.

    A workload is an object with num_blocks, requests (arrival_step, prompt_len, output_len each)
    and any knob by its name. A trace or a recording has times instead of steps: give --summary, and
    step times (those of a recording are its own).
    """
    from stepscope.tui.cli.simulation import schedule as command
    from stepscope.tui.cli.simulation.simulate import EngineOptions

    engine = EngineOptions(
        gpu, model, step_time, like=like, num_blocks=num_blocks, block_size=block_size
    )
    options = command.ScheduleOptions(summary, modes, as_json, sweep, runs)
    command.schedule(file, options, engine, flags)


@commands.command("simulated-engine", hidden=True)
@with_options("knobs")
def simulated_engine(
    endpoint: Annotated[str, typer.Option()],
    gpu: Annotated[str | None, typer.Option()] = None,
    step_time: Annotated[str | None, typer.Option()] = None,
    model: Annotated[str | None, typer.Option()] = None,
    num_blocks: Annotated[int | None, typer.Option()] = None,
    speed: Annotated[float, typer.Option()] = 1.0,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin")] = False,
    slo_ttft: Annotated[str | None, typer.Option("--slo-ttft-ms")] = None,
    slo_itl: Annotated[str | None, typer.Option("--slo-itl-ms")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """The engine of 'stepscope demo --simulate' and 'stepscope tour --simulate'."""
    from stepscope.tui.cli.shared.levels import level_flags
    from stepscope.tui.cli.simulation import simulated_engine as command

    levels = level_flags(slo_itl, slo_ttft)
    command.run(endpoint, gpu, step_time, model, num_blocks, speed, exit_with_stdin, levels, flags)
