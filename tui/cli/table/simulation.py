"""Commands that simulate instead of running a model, and the autopilot."""

from typing import Annotated, Any, Literal

import typer

from stepscope.tui.cli.shared.options import with_options
from stepscope.tui.cli.table.shared import (
    As,
    AsJson,
    Endpoint,
    Like,
    RecordingFile,
    SloItl,
    SloTtft,
    Target,
    example,
    with_key,
)

commands = typer.Typer(rich_markup_mode=None)

_Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", help="how long to watch an engine  [default: 60]", show_default=False
    ),
]


@commands.command(
    epilog=example(
        "stepscope simulate mix --rate 8 --num-requests 500 --gpu h100",
        "stepscope simulate trace.csv --gpu h100 --model qwen3-8b --runs 5",
        "stepscope simulate session.mcap --step-time session.mcap -o again.mcap",
    )
)
@with_options("knobs", "load")
def simulate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|FILE|mix",
            help="a trace (Azure CSV, Mooncake JSONL), a recording or sample, or 'mix': the "
            "load of the options below",
        ),
    ],
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
    "what-if",
    epilog=example(
        "stepscope what-if session.mcap max_num_batched_tokens=1024",
        "stepscope what-if session.mcap max_num_seqs=8 batching=static,order=arrival",
        "stepscope what-if s.mcap --sweep max_num_batched_tokens=64..8192 -o s.svg",
        "stepscope what-if s.mcap max_num_seqs=8 -o 8.mcap",
    ),
)
def what_if(
    file: RecordingFile,
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KNOB=VALUE,...",
            help="each argument is a variant; commas join knobs that change together",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KNOB=FIRST..LAST", help="variants over a range, evenly in ratio"),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVELS",
            help="service levels to count goodput by ('ttft=500 itl=50'; default: those of the "
            "recording)",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="of one variant: a simulated session as a recording, and nothing else (.mcap); of "
            "--sweep: also TTFT against ITL (.svg, .png or .pdf)",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a recorded session would have been with other knobs.

    The arrivals, lengths and prefix hits are those of the recording, and step times are fitted on
    it. Beside each forecast stand what was recorded and the same knobs simulated.
    """
    from stepscope.tui.cli.simulation import what_if as command

    command.run(file, variants or (), sweep, slo or (), output, as_json)


@commands.command(
    epilog=example(
        "stepscope tune session.mcap --slo-itl 50ms --slo-ttft 1s",
        "stepscope tune engine-0 --slo-itl 30ms --seconds 120",
    )
)
@with_key
def tune(
    target: Target = None,
    *,
    seconds: _Seconds = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
) -> int:
    """Find the knobs that keep the service levels best.

    Candidates are simulated with the recorded requests, as in 'stepscope what-if'. Nothing is
    changed. Says why, and which load would do, if no knobs keep the levels (exit code 1).
    """
    from stepscope.tui.cli.simulation import tune as command

    return command.run(target, seconds, slo_itl, slo_ttft, as_json)


@commands.command(
    epilog=example(
        "stepscope diagnose session.mcap",
        "stepscope diagnose engine-0 --slo-itl 30ms --slo-ttft 1s --seconds 120",
    )
)
@with_key
def diagnose(
    target: Target = None,
    *,
    seconds: _Seconds = None,
    slo_itl: SloItl = None,
    slo_ttft: SloTtft = None,
    as_json: AsJson = False,
) -> None:
    """Find the setting that is the bottleneck, and prove it.

    The steps show which settings may hold the engine back: seats, budget, KV memory and its
    reservation, the batching mode, long prompts, the prefix cache, the host. The recorded requests
    are then simulated with each limit lifted. Nothing is changed.
    """
    from stepscope.tui.cli.simulation import diagnose as command

    command.run(target, seconds, slo_itl, slo_ttft, as_json)


@commands.command(
    epilog=example(
        "stepscope autopilot --slo-itl 50ms --shadow",
        "stepscope autopilot engine-0 --slo-itl 30ms --as night-shift",
    )
)
@with_key
def autopilot(
    endpoint: Endpoint = None,
    *,
    slo_itl: SloItl = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="only say what it would do; change nothing")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="how long (default: until Ctrl-C)")
    ] = None,
    name: As = None,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON document a line")] = False,
) -> int:
    """Hold an ITL level by moving the token budget of an engine.

    Keeps 95 % of the gaps between tokens within the level. It predicts step times with a model
    fitted on the engine's own steps, and also limits the running requests if the budget alone is
    not enough. Every move is in the engine's audit with its reason. The old values of the knobs
    are restored when the autopilot ends, dies or loses the telemetry. It ends when somebody else
    sets one of its knobs.
    """
    from stepscope.tui.cli.simulation import autopilot as command

    return command.run(endpoint, slo_itl, shadow, seconds, name, as_json)


@commands.command(
    epilog=example(
        "stepscope schedule workload.json --batching static --summary",
        "stepscope schedule workload.json --max-num-batched-tokens 256 | head",
        "stepscope schedule trace.csv --summary --modes all --gpu h100",
        "stepscope schedule session.mcap --summary --mode-file my.py:shortest_first",
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
    mode_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="a batching mode of your own: a function of a StepPlan, as in "
            "engine/scheduling/batching.py",
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
    options = command.ScheduleOptions(summary, modes, mode_file, as_json, sweep, runs)
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
    *,
    flags: dict[str, Any],
) -> None:
    """The engine of 'stepscope demo --simulate' and 'stepscope tour --simulate'."""
    from stepscope.tui.cli.simulation import simulated_engine as command

    command.run(endpoint, gpu, step_time, model, num_blocks, speed, exit_with_stdin, flags)
