"""The `stepscope` command: joins the commands of `stepscope.tui.cli.table` and reports errors."""

import sys
from functools import cache
from typing import Annotated, Any

import typer
from typer.main import get_command

from stepscope.tui.cli.shared.errors import report, write_what_encodings_lack
from stepscope.tui.cli.table import (
    bench,
    dashboard,
    engines,
    keys,
    lab,
    pictures,
    recordings,
    sessions,
    simulation,
    tuning,
)
from stepscope.tui.settings.cli_errors import DONE, WRONG_USAGE

app = typer.Typer(
    name="stepscope",
    help="See and steer every forward step of an LLM inference engine, in a terminal.",
    epilog="Alone, in a terminal, it opens a start screen.\n\n"
    "\b\nExample:\n  stepscope demo\n\n"
    "Exit codes: 0 done, 1 it failed, 2 wrong usage, 3 too little data (check), 130 interrupted.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for group in (dashboard, engines, simulation, tuning, sessions, recordings, pictures):
    app.add_typer(group.commands)
app.add_typer(keys.commands)
app.add_typer(bench.commands)
app.add_typer(lab.commands)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"stepscope {version('stepscope')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        from stepscope.tui.cli.dashboards import start as command

        if command.can_start():
            command.start()
            raise typer.Exit(DONE)
        print(context.get_help())
        raise typer.Exit(WRONG_USAGE)


@cache
def command_tree() -> Any:
    """Return the command with its subcommands, as `typer` runs it. To build it takes 30 ms."""
    return get_command(app)


def run() -> int:
    """Run the command named by this process's arguments; return the exit code.

    Raises:
        KeyboardInterrupt: the command did not handle it.
    """
    write_what_encodings_lack()
    try:
        result = command_tree()(prog_name="stepscope", standalone_mode=False)
    except BrokenPipeError:
        # The program that read our output closed the pipe ('| head').
        sys.stdout = None
        return DONE
    except Exception as error:  # noqa: BLE001 - the one place that reports errors
        return report(error)
    return result if isinstance(result, int) else DONE
