"""`stepscope bench`: commands that measure an engine on this machine."""

from typing import Annotated, Any

import typer

from stepscope.tui.command_table.shared import example
from stepscope.tui.commands.errors import WRONG_USAGE
from stepscope.tui.commands.options import with_options

commands = typer.Typer(
    name="bench",
    help="Measure an engine on this machine.",
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)


@commands.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG_USAGE)


@commands.command(
    epilog=example(
        "stepscope bench throughput",
        "stepscope bench throughput --num-requests 256 --json out.json",
        "stepscope bench throughput --num-requests 32 --input-len 512 --output-len 64",
    )
)
@with_options("serve", "knobs")
def throughput(
    num_requests: Annotated[
        int | None, typer.Option(metavar="INT", help="requests  [default: 256, on a CPU 32]")
    ] = None,
    input_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="tokens of a prompt, drawn evenly; or one number"),
    ] = "100:1024",
    output_len: Annotated[
        str,
        typer.Option(metavar="LOW:HIGH", help="tokens of an output, drawn evenly; or one number"),
    ] = "100:1024",
    temperature: Annotated[
        float, typer.Option(metavar="NUMBER", help="of the sampling; 0 is greedy")
    ] = 0.0,
    warmup: Annotated[
        int, typer.Option(metavar="INT", help="requests before the clock starts")
    ] = 2,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="also write everything measured to this file"),
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Run fixed requests through an engine, as fast as it goes.

    The engine is that of 'stepscope serve', in this process. All requests are there at once, their
    token ids are random, and no end token ends them. The defaults are the usual yardstick: 256
    requests, prompts and outputs of 100 to 1024 tokens, seed 0; on a CPU only the first 32 of them.
    --seed draws lengths and token ids too.
    """
    from stepscope.tui.commands import bench as command

    command.throughput(num_requests, input_len, output_len, temperature, warmup, json_file, flags)
