"""`stepscope bench`: commands that measure an engine on this machine."""

from typing import Annotated, Any

import typer

from stepscope.tui.cli.shared.options import example, help_alone, with_options

commands = typer.Typer(
    name="bench",
    help="Measure an engine on this machine.",
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)


commands.callback(invoke_without_command=True)(help_alone)


@commands.command(
    epilog=example(
        "stepscope bench throughput",
        "stepscope bench throughput --num-requests 256 -o out.json",
        "stepscope bench throughput --model smollm2 --num-requests 32",
        "stepscope bench throughput --num-requests 32 --input-len 512 --output-len 64",
    )
)
@with_options("serve", "knobs")
def throughput(
    num_requests: Annotated[
        int | None,
        typer.Option(metavar="INT", help="number of requests  [default: 256, on a CPU 32]"),
    ] = None,
    input_len: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH",
            help="prompt length in tokens: a range to draw from evenly, or one number",
        ),
    ] = "100:1024",
    output_len: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH",
            help="output length in tokens: a range to draw from evenly, or one number",
        ),
    ] = "100:1024",
    temperature: Annotated[
        float, typer.Option(metavar="NUMBER", help="sampling temperature; 0 is greedy")
    ] = 0.0,
    warmup: Annotated[
        int, typer.Option(metavar="INT", help="requests before the clock starts")
    ] = 2,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            "--json",
            metavar="FILE",
            help="also write everything measured to this file (JSON)",
        ),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Run a fixed set of requests through an engine, as fast as it can.

    The engine is that of 'stepscope serve', in this process. All requests are there at once, their
    token ids are random, and no end token ends them. The defaults are a common yardstick: 256
    requests, prompts and outputs of 100 to 1024 tokens, seed 0; on a CPU only the first 32 of them.
    --seed draws lengths and token ids too.
    """
    from stepscope.tui.cli.bench import bench as command

    command.throughput(num_requests, input_len, output_len, temperature, warmup, json_file, flags)


@commands.command(
    epilog=example(
        "stepscope bench gpu",
        "stepscope bench gpu --only b,c --models qwen3-8b -o mine.json",
        "stepscope bench gpu --show mine.json theirs.json",
        "stepscope bench gpu --device cpu",
    )
)
def gpu(
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="with --show: a second report, beside the first"),
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="the report, JSON  [default: bench-gpu-DATE-DEVICE.json]",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PARTS", help="these parts, by letter: a,b,e")
    ] = None,
    skip: Annotated[str | None, typer.Option(metavar="PARTS", help="all but these parts")] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="shapes  [default: qwen3-0.6b,qwen3-8b,llama-3.1-8b]"),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="time limit for all parts together")
    ] = 460.0,
    recordings: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="write recordings of part h (modes continuous and chunked) to this folder",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cuda, cuda:N, or cpu to try the bench itself")
    ] = "cuda",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="tiny models, about a minute: only shows that the bench runs"),
    ] = False,
    show: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="measure nothing: print the table of this report"),
    ] = None,
) -> None:
    """Measure what the engine makes of a GPU, against what the GPU can do.

    Models have real shapes and random weights: nothing is downloaded. The parts: a ceilings (copy,
    product); b decode; c prefill; d step time over tokens, and its knee; e kernels alone; f the
    256-request yardstick; g the same through transformers; h long prompts among decodes, in each
    batching mode; i telemetry on and off; j exactness.

    Each model is measured in a process of its own, and a part that fails is a line in the report.
    """
    if show is not None:
        from stepscope.tui.cli.bench import bench_gpu as command

        command.show([show, *(more or ())])
        return
    from stepscope.tui.cli.bench import bench_gpu as command

    if more:
        raise typer.BadParameter("files go with --show", param_hint="FILE")
    command.gpu(output, device, only, skip, models, time_limit, recordings, quick=quick)
