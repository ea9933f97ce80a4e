"""`stepscope lab`: commands that try claims of the literature on this machine."""

from typing import Annotated

import typer

from stepscope.tui.cli.shared.options import example

commands = typer.Typer(
    name="lab",
    help="Try what the literature claims on this machine.",
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)


@commands.callback(
    invoke_without_command=True,
    epilog=example("stepscope lab", "stepscope lab run freeze"),
)
def lab(context: typer.Context) -> None:
    """List the experiments: what is claimed, and by whom."""
    if context.invoked_subcommand is None:
        from stepscope.tui.cli.lab import lab as command

        command.show()


@commands.command(
    epilog=example(
        "stepscope lab run freeze",
        "stepscope lab run prefix freeze --model smollm2",
        "stepscope lab run knee --engine engine-0",
        "stepscope lab run --all -o lab/",
    )
)
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="the experiments", show_default=False),
    ] = None,
    runs_all: Annotated[bool, typer.Option("--all", help="run all of them")] = False,
    model: Annotated[
        str, typer.Option(metavar="TEXT", help="the model, as in 'stepscope serve'")
    ] = "demo",
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="use an engine that runs and has nothing else to do, in place of one of its own",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="keep the recordings, a report (Markdown) and a picture of each claim",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Run experiments: record each arm, and say whether the claim holds here.

    Each arm is a run of the same engine with other knobs. Figures come from the recordings.
    """
    from stepscope.tui.cli.lab import lab as command

    command.run(names or (), runs_all, model, engine, output)
