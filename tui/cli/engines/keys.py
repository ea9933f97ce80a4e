"""`stepscope keys`, and the key with which other commands connect to an engine."""

import shlex
from pathlib import Path

import typer

from stepscope.engine.protocol.commands import LOCAL
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import KeyFolder, Role
from stepscope.tui.cli.shared.options import AsJson, argument, command, option
from stepscope.tui.cli.shared.output import say, text_table, write_json
from stepscope.tui.settings.cli_errors import WRONG_USAGE, WrongUsage

_FOLDER = option(
    "DIR",
    "folder of the authorised keys, as for 'stepscope serve' (default: in the config folder)",
    "--keys",
)
_NAME = argument("NAME", "who the key is for", default=...)


@command(
    "stepscope keys new alice --role viewer",
    "stepscope keys new bob --role operator --endpoint tcp://gpu-7:5555",
)
def new(
    name: str = _NAME,
    role: Role = option(
        "viewer|operator", "a viewer only watches, an operator may do everything", default=...
    ),
    output: Path | None = option(
        "FILE", "the key file to write (default: NAME.key here)", "--output", "-o"
    ),
    endpoint: str | None = option(
        "tcp://HOST:PORT", "the engine's address for the key's holder; the key then needs no --key"
    ),
    folder: Path | None = _FOLDER,
) -> None:
    """Authorise a new key, and write the one file that its holder needs."""
    if name == LOCAL:
        raise WrongUsage(
            f"{LOCAL!r} is the audit's name for the engine's own account; choose another"
        )
    where = None
    if endpoint is not None:
        where = Endpoint.parse(endpoint).control
        if not where.startswith("tcp://"):
            raise WrongUsage(f"--endpoint: expected tcp://HOST:PORT, got {endpoint}")
    output = output or Path(f"{name}.key")
    keys = KeyFolder(folder)
    credentials = keys.add(name, role, output, where)
    say(
        f"{name} ({role}) is authorised in {keys.path}; running engines accept the key at once.",
        f"{output} is all that {name} needs, and a secret: it goes to their machine as",
        f"  ~/.config/stepscope/keys/{name}.key   (mode 0600)",
        f"There: stepscope top {where or 'tcp://HOST:PORT'}",
        f"The engine's public key, which the file pins: {credentials.server}",
    )
    if endpoint is not None and Endpoint.parse(endpoint).is_private:
        say(
            "Only this machine can reach that endpoint: an engine asks for keys there only with",
            f"  stepscope serve --endpoint {where} --keys {shlex.quote(str(keys.path))}",
        )


@command("stepscope keys list", "stepscope keys list --json", name="list")
def list_keys(folder: Path | None = _FOLDER, as_json: AsJson = False) -> None:
    """List the keys that are authorised."""
    keys = KeyFolder(folder)
    if folder is not None or keys.path.exists():
        keys.check()
    holders = list(keys.holders().values()) if keys.path.exists() else []
    if as_json:
        write_json([holder._asdict() for holder in holders])
        return
    rows = [[each.name, each.role, each.created, each.public] for each in holders]
    none = f"no key is authorised in {keys.path}"
    say(*(text_table([""] * 4, rows, "<<<<")[1:] if rows else [none]))


@command("stepscope keys revoke alice")
def revoke(name: str = _NAME, folder: Path | None = _FOLDER) -> None:
    """Revoke a key; running engines cut its connections off at once."""
    keys = KeyFolder(folder)
    keys.revoke(name)
    say(
        f"{name} has no access any more; running engines cut off its connections",
        "(engines on 127.0.0.1 or ipc:// ask for keys only with 'stepscope serve --keys DIR')",
    )


commands = typer.Typer(
    name="keys",
    help="Make, list and revoke the keys that engines let in.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
for _each in (new, list_keys, revoke):
    _each.add_to(commands)


@commands.callback(invoke_without_command=True)
def _help_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG_USAGE)
