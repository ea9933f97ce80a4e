"""What several commands have in common."""

from typing import Annotated

import typer

Endpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="ENDPOINT",
        help="name of a local engine, ipc://PATH or tcp://HOST:PORT (default: the only local one)",
    ),
]


def example(*lines: str) -> str:
    """The epilog of a command's help."""
    return "\b\nExample:\n" + "\n".join("  " + line for line in lines)
