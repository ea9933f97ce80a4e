"""`stepscope keys`: who may connect to engines that ask for keys."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.tui.cli.table.shared import example, help_alone

commands = typer.Typer(
    name="keys",
    help="Make, list and revoke the keys that engines let in.",
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        help="folder of the authorised keys, as for 'stepscope serve' (default: in the config "
        "folder)",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="who the key is for")]


commands.callback(invoke_without_command=True)(help_alone)


@commands.command(
    epilog=example(
        "stepscope keys new alice --role viewer",
        "stepscope keys new bob --role operator --endpoint tcp://gpu-7:5555",
    )
)
def new(
    name: Name,
    role: Annotated[
        str,
        typer.Option(
            metavar="viewer|operator", help="a viewer only watches, an operator may do everything"
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="the key file to write (default: NAME.key here)",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="tcp://HOST:PORT",
            help="the engine's address for the key's holder; the key then needs no --key",
            show_default=False,
        ),
    ] = None,
    keys: Folder = None,
) -> None:
    """Authorise a new key, and write the one file that its holder needs."""
    from stepscope.tui.cli.engines import keys as command

    command.new(name, role, output, endpoint, keys)


@commands.command("list", epilog=example("stepscope keys list", "stepscope keys list --json"))
def list_(
    keys: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="as one JSON document")] = False,
) -> None:
    """List the keys that are authorised."""
    from stepscope.tui.cli.engines import keys as command

    command.list_keys(keys, as_json)


@commands.command(epilog=example("stepscope keys revoke alice"))
def revoke(name: Name, keys: Folder = None) -> None:
    """Revoke a key; running engines cut its connections off at once."""
    from stepscope.tui.cli.engines import keys as command

    command.revoke(name, keys)
