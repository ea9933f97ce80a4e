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
