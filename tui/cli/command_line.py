"""The `stepscope` command: its subcommands by name, and where each of them is.

A command's module has its options beside its body, and is imported only when it is called. So the
list of commands needs none of them.
"""

import codecs
import io
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from stepscope.tui.cli.shared.options import CliCommand
from stepscope.tui.cli.shared.process import report
from stepscope.tui.settings.cli_errors import DONE, WRONG_USAGE
from stepscope.tui.settings.terminal import can_be_drawn_on

# Of each command: its name, its module below `stepscope.tui.cli` (and function, if it is not named
# alike), and the first line of its help.
_LIST = """
Watch and steer
top  dashboards.top  Watch and steer running engines.
set  engines.set:set_knobs  Change knobs of a running engine; print the step of effect.
snapshot  engines.snapshot  Show what an engine or a /metrics page says now.
watch  engines.watch  Watch an engine by rules: a line when one fires or ends.
record  recordings.record  Record every step of an engine to a file, without a screen.

Look back
replay  dashboards.replay  Show a recording in the dashboard.
compare  dashboards.compare  Say which of two runs is better, in what, and why.
explain  recordings.explain  Say which tokens came late, and why; also who waits, or what ran.
stats  recordings.check:stats  Print all figures of a recording, an engine or /metrics.
check  recordings.check  Check that a session keeps its bounds, for CI.
export  recordings.export:export_file  Convert a recording to the format of another program.
screenshot  dashboards.replay:screenshot_file  Draw the dashboard at a step of a recording.
plot  recordings.export:plot_file  Draw a figure of a recording for a report.

Predict
simulate  simulation.simulate  Run a workload on a GPU that is not here.
what-if  simulation.what_if  Say what a recorded session would have been with other knobs.
tune  simulation.tune  Find the knobs that keep the service levels best.

Run an engine
serve  engines.serve  Run an engine, and publish every step of it.
load  engines.load  Send work to an engine: a synthetic mix, or a real trace.
chat  engines.chat  Talk to a model, and see what its tokens waited for.
demo  dashboards.demo  Start a real engine and watch it at work, or simulate one.
bench  engines.bench  Measure an engine on this machine.

Learn
tour  dashboards.demo:tour  Learn how serving works, on a live engine.
lab  lab.lab  Try what the literature claims on this machine.

Care
verify  recordings.verify:verify_file  Check a recording from its bytes to its KV accounting.
doctor  engines.doctor  Show what is installed, what will be used and what is missing.
keys  engines.keys:commands  Make, list and revoke the keys that engines let in.
config  engines.config  Show the settings, and where each of them comes from.
"""
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    title: {name: (place, line) for name, place, line in (row.split("  ") for row in rows)}
    for title, *rows in (block.splitlines() for block in _LIST.strip().split("\n\n"))
}
# Run by other commands, in processes of their own.
_INTERNAL = {
    "http": "engines.serve:serve_http_for",
    "simulated-engine": "simulation.runs:simulated_engine",
}
_PLACES = {name: place for group in GROUPS.values() for name, (place, _) in group.items()}
_NAME_WIDTH = 12


class _Commands(Mapping[str, Any]):
    """The commands by name. To list the names imports nothing, to get one imports its module."""

    def __getitem__(self, name: str) -> Any:
        module, _, member = (_PLACES.get(name) or _INTERNAL[name]).partition(":")
        imported = import_module(f"stepscope.tui.cli.{module}")
        found = getattr(imported, member or module.split(".")[1])
        if isinstance(found, CliCommand):
            found = found.add_to(typer.Typer(add_completion=False, rich_markup_mode=None))
        return get_command(found)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


class _CommandLine(TyperGroup):
    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.commands = _Commands()  # type: ignore[assignment]

    def format_help(self, context: Any, formatter: Any) -> None:
        lines = [self.help or "", "Usage: stepscope [--version] [--help] COMMAND [ARGS]...", ""]
        for title, group in GROUPS.items():
            lines.append(title)
            lines += [f"  {name:<{_NAME_WIDTH}}{summary}" for name, (_, summary) in group.items()]
        formatter.write("\n".join([*lines, "", self.epilog or ""]) + "\n")


app = typer.Typer(
    name="stepscope",
    cls=_CommandLine,
    help="See and steer every forward step of an LLM inference engine, in a terminal.",
    epilog="Alone, in a terminal, it opens a start screen. Exit codes: 0 done, 1 it failed,\n"
    "2 wrong usage, 3 too little data to say, 130 interrupted.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    if show_version:
        from importlib.metadata import version

        print(f"stepscope {version('stepscope')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        if can_be_drawn_on():
            from stepscope.tui.cli.dashboards.start import start

            start()
            raise typer.Exit(DONE)
        print(context.get_help())
        raise typer.Exit(WRONG_USAGE)


@cache
def command_tree() -> Any:
    return get_command(app)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return an ASCII character for each glyph that an encoding lacks, `?` for others."""
    assert isinstance(error, UnicodeEncodeError)
    from stepscope.tui.views.theme import TO_ASCII  # takes long to import

    text = error.object[error.start : error.end].translate(TO_ASCII)
    return text.encode("ascii", "replace").decode(), error.end


def run() -> int:
    """Run the command named by this process's arguments; return the exit code."""
    codecs.register_error("glyphs", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="glyphs")
    try:
        result = command_tree()(prog_name="stepscope", standalone_mode=False)
    except BrokenPipeError:
        # The program that read our output closed the pipe ('| head').
        sys.stdout = None
        return DONE
    except Exception as error:  # noqa: BLE001 - the one place that reports errors
        return report(error)
    return result if isinstance(result, int) else DONE
