"""Commands that open the dashboard."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stepscope.tui.cli.shared.options import with_options
from stepscope.tui.cli.table.shared import As, AsJson, Like, RecordingFile, Wait, example, with_key

commands = typer.Typer(rich_markup_mode=None)


@commands.command(
    epilog=example(
        "stepscope demo",
        "stepscope demo --model smollm2",
        "stepscope demo --rate 0.5",
        "stepscope demo --simulate h100 --model llama-3.1-8b --speed 10",
        "stepscope demo --headless --record out.mcap --screenshot out.svg",
    )
)
@with_options("dashboard")
def demo(
    model: Annotated[
        str, typer.Option(metavar="TEXT", help="the model, as in 'stepscope serve'")
    ] = "demo",
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="requests a second at most (default: the next comes when one ends)",
            show_default=False,
        ),
    ] = None,
    headless: Annotated[
        bool,
        typer.Option("--headless", help="run without a terminal and print a summary at the end"),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="with --headless: how long to run (default: 20)"),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="record the session (MCAP)")
    ] = None,
    screenshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="with --headless: draw the last screen (.svg or .txt)"),
    ] = None,
    with_tokens: Annotated[
        bool, typer.Option("--with-tokens", help="show and record prompts and outputs too")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="GPU",
            help="simulate a GPU (h100, a100, ...) with --model on it, llama-3.1-8b if not given",
        ),
    ] = None,
    speed: Annotated[
        float,
        typer.Option(metavar="NUMBER", help="with --simulate: 10 is ten times as fast"),
    ] = 1.0,
    *,
    flags: dict[str, Any],
) -> None:
    """Start a real engine and watch it at work, or simulate one."""
    from stepscope.tui.cli.dashboards import demo as command
    from stepscope.tui.cli.dashboards.demo_engine import simulated_gpu

    simulated = simulated_gpu(gpu, speed)
    command.demo(model, headless, seconds, record, screenshot, flags, with_tokens, rate, simulated)


@commands.command(epilog=example("stepscope tour", "stepscope tour 4", "stepscope tour --simulate"))
@with_options("dashboard")
def tour(
    chapter: Annotated[
        int | None,
        typer.Argument(
            metavar="CHAPTER",
            help="a step, the batch, the budget, a freeze, chunks, the knee, KV blocks, prefix "
            "hits, preemption, a late token: 1 to 10 (default: where you left it)",
            show_default=False,
        ),
    ] = None,
    *,
    simulate: Annotated[
        bool | None,
        typer.Option(
            "--simulate/--no-simulate",
            help="simulate the engine instead of running one (default: only where torch is "
            "missing)",
            show_default=False,
        ),
    ] = None,
    flags: dict[str, Any],
) -> None:
    """Learn how serving works, on a live engine."""
    from stepscope.tui.cli.dashboards import tour as command

    command.tour(chapter, simulate, flags)


@commands.command(
    epilog=example(
        "stepscope top",
        "stepscope top tcp://127.0.0.1:5555 --readonly --past 300",
        "stepscope top engine-0 engine-1 tcp://127.0.0.1:5555",
        "stepscope top http://127.0.0.1:8000",
    )
)
@with_key
@with_options("dashboard")
def top(
    endpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENDPOINT",
            help="names of local engines, ipc://PATH, tcp://HOST:PORT, http://HOST:PORT of a "
            "server with /metrics, a JSON file that lists servers; several are shown side by side "
            "(default: [fleet] engines of the config file, else those of this machine)",
            show_default=False,
        ),
    ] = None,
    *,
    past: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="begin with this much of the engine's past, as far as it keeps it; 0 for none",
        ),
    ] = 60.0,
    name: As = None,
    wait: Wait = True,
    flags: dict[str, Any],
) -> None:
    """Watch and steer running engines."""
    from stepscope.tui.cli.dashboards import top as command

    command.top(endpoints or (), flags, name, past, wait)


@commands.command(
    epilog=example(
        "stepscope config",
        "stepscope config dashboard",
        "stepscope config --path",
        "stepscope config --like vllm",
    )
)
@with_options("dashboard")
def config(
    section: Annotated[
        str | None, typer.Argument(metavar="SECTION", help="show only this section (default: all)")
    ] = None,
    path: Annotated[
        bool, typer.Option("--path", help="print only the path of the config file")
    ] = False,
    like: Like = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Show the settings, and where each of them comes from."""
    from stepscope.tui.cli.dashboards import config as command

    command.config(section, path, flags, like)


@commands.command(
    epilog=example("stepscope replay session.mcap --speed 4", "stepscope replay chunked --at 120")
)
@with_options("dashboard")
def replay(
    file: RecordingFile,
    speed: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="2 is twice as fast  [default: 1]")
    ] = None,
    at: Annotated[int | None, typer.Option(metavar="STEP", help="open paused at this step")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Show a recording in the dashboard. Of a folder, list the incidents that are kept in it."""
    from stepscope.tui.cli.dashboards import replay as command

    command.replay(file, speed, at, flags)


@commands.command(
    epilog=example(
        "stepscope compare freeze chunked",
        "stepscope compare freeze chunked --align request --table",
        "stepscope compare before.mcap after.mcap -o compare.svg --size 160x48",
        "stepscope compare session.mcap --mark 'new budget' --json | jq .figures.itl_p99_ms",
    )
)
@with_options("dashboard")
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="a recording, a shipped sample, or a live engine")
    ],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="a recording or sample to compare with A")
    ] = None,
    mark: Annotated[
        str | None,
        typer.Option(
            metavar="MARK",
            help="instead of B: compare A before and after a mark or knob change (back to the "
            "change before it, on to the next), or all of A before and after a step",
        ),
    ] = None,
    align: Annotated[
        str | None,
        typer.Option(
            metavar="time|step|request",
            help="how to align the two runs; the table then also shows what both did there",
        ),
    ] = None,
    as_table: Annotated[
        bool, typer.Option("--table", help="print a table, even on a terminal")
    ] = False,
    as_json: AsJson = False,
    limit: Annotated[
        int, typer.Option(metavar="INT", help="number of requests in the table, 0 for all")
    ] = 20,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="draw the screen into a .svg or .txt"),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="COLUMNSxROWS", help="size of the screen to draw")
    ] = "120x40",
    *,
    flags: dict[str, Any],
) -> None:
    """Say which of two runs is better, in what, and why.

    On a terminal it opens the dashboard, elsewhere it prints. A ratio is B against A. A difference
    counts only if it is unlikely to be chance, and if the load was the same.
    """
    from stepscope.tui.cli.dashboards import compare as command

    command.compare(a, b, mark, align, limit, as_table, as_json, flags, output, size)
