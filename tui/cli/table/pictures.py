"""Commands that draw pictures of recordings."""

from typing import Annotated

import typer

from stepscope.tui.cli.table.shared import FirstStep, LastStep, RecordingFile, example

commands = typer.Typer(rich_markup_mode=None)

_SloITL = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="a longer gap between two tokens is a breach  [default: as the file says, else 50ms]",
    ),
]
_SloTTFT = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="a later first token is a breach  [default: as the file says, else 500ms]",
    ),
]


@commands.command(
    epilog=example(
        "stepscope screenshot session.mcap --at 1200 -o stall.svg",
        "stepscope screenshot freeze --page latency --size 160x48 -o late.svg",
        "stepscope screenshot freeze --axis time --zoom 10 -o freeze.svg",
    )
)
def screenshot(
    file: RecordingFile,
    *,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="the picture to write: .svg or .txt"),
    ],
    at: Annotated[
        int | None, typer.Option(metavar="STEP", help="the step to show  [default: the last]")
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            metavar="SCREEN",
            help="main, step, request, kv, latency or knobs, or its key, 1 to 6  [default: main]",
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="select this request, such as r12, and show its screen"),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="COLUMNSxROWS", help="size of the screen to draw")
    ] = "120x40",
    axis: Annotated[
        str | None,
        typer.Option(
            metavar="step|time", help="what a column of the charts stands for  [default: step]"
        ),
    ] = None,
    zoom: Annotated[
        int, typer.Option(metavar="N", help="steps in a column; on the time axis N x 10 ms")
    ] = 1,
    theme: Annotated[
        str | None, typer.Option(metavar="dark|light", help="colours  [default: dark]")
    ] = None,
    ascii: Annotated[
        bool | None,
        typer.Option("--ascii/--no-ascii", help="ASCII characters only", show_default=False),
    ] = None,
    slo_itl: _SloITL = None,
    slo_ttft: _SloTTFT = None,
) -> None:
    """Draw the dashboard at a step of a recording.

    No terminal is needed. SVG keeps its text selectable. An existing file is replaced. Options
    override [dashboard] in the config file. Service levels come from the options, else from the
    recording, else from the config file.
    """
    from stepscope.tui.cli.dashboards import screenshot as command

    flags = {"theme": theme, "ascii": ascii, "axis": axis}
    command.screenshot_file(file, at, output, page, size, zoom, request, slo_itl, slo_ttft, flags)


@commands.command(
    epilog=example(
        "stepscope plot session.mcap -o session.svg --slo-itl 50ms",
        "stepscope plot freeze --from 300 --until 400 --title Freeze -o f.png",
    )
)
def plot(
    file: RecordingFile,
    *,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="the figure to write: .svg, .png or .pdf"
        ),
    ],
    first: FirstStep = None,
    last: LastStep = None,
    slo_itl: _SloITL = None,
    slo_ttft: _SloTTFT = None,
    size: Annotated[str, typer.Option(metavar="WIDTHxHEIGHT", help="in inches")] = "9x9",
    theme: Annotated[str, typer.Option(metavar="light|dark", help="for paper, or for slides")] = (
        "light"
    ),
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="heading  [default: the recording's name]")
    ] = None,
) -> None:
    """Draw a figure of a recording for a report.

    Budget, step times, latencies, queue and KV cache over time. Each column of pixels shows the
    worst that happened in it, so no stall is averaged away; knob changes and marks are lines with
    labels. Needs 'stepscope[export]'. An existing file is replaced.
    """
    from stepscope.tui.cli.recordings import plot as command

    command.plot_file(file, output, first, last, slo_itl, slo_ttft, size, theme, title)
