"""Arguments, options and decorators that several commands share."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from stepscope.tui.settings.cli_errors import WRONG_USAGE


def option(metavar: str, help: str, *names: str, **rest: Any) -> Any:
    """Return an option that takes a value; `names` if it is not named after its parameter."""
    return typer.Option(*names, metavar=metavar, help=help, **rest)


EngineName = Annotated[
    str | None,
    typer.Argument(
        metavar="ENDPOINT",
        help="name of a local engine, ipc://PATH or tcp://HOST:PORT (default: the only local one)",
    ),
]

Like = Annotated[
    str | None,
    option(
        "ENGINE",
        "begin with another engine's defaults: vllm, sglang, mini-sglang or tensorrt-llm, "
        "of a version (vllm@0.20) and a class of GPU (vllm/b200)",
        "--like",
    ),
]

As = Annotated[
    str | None,
    option(
        "NAME",
        "your name in the audit, unproved unlike a key (default: [client] name, else "
        "account, terminal and machine)",
        "--as",
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="wait for an engine that is not there yet")
]
RecordingFile = Annotated[
    str, typer.Argument(metavar="FILE", help="a recording, or the name of a shipped sample")
]
FirstStep = Annotated[int | None, option("STEP", "the first step to take", "--from")]
LastStep = Annotated[int | None, option("STEP", "the last step to take", "--until")]
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE|ENDPOINT",
        help="a recording, a sample or an engine (default: the only local engine)",
    ),
]
LastSeconds = Annotated[
    float | None,
    option(
        "NUMBER", "only the last seconds (default: the whole recording, or a minute of an engine)"
    ),
]
SloItl = Annotated[
    str | None,
    option(
        "TIME",
        "a longer gap between two tokens is late (default: the recording's, else [dashboard] "
        "in the config file)",
    ),
]
SloTtft = Annotated[str | None, option("TIME", "a later first token is late")]
WatchSeconds = Annotated[
    float | None, option("NUMBER", "how long to watch an engine  [default: 60]")
]
AsJson = Annotated[bool, typer.Option("--json", help="print everything as one JSON document")]

_KEY_OPTIONS = {
    "key": option(
        "FILE",
        "key file, for an engine that asks for one (default: the one in the config folder's "
        "keys/ that fits)",
    ),
    "server_key": option("KEY", "the engine's public key, if not the one in the key file"),
}


def help_alone(context: typer.Context) -> None:
    """Callback of a group of commands: the group's name alone prints the list of commands."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG_USAGE)


def with_key(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options about keys to a command that connects to an engine.

    Apply it last, directly below `@commands.command`.
    """

    def run(*own: Any, **arguments: Any) -> Any:
        from stepscope.tui.cli.shared.client_key import note_unused_key, use_key

        given = {name: arguments.pop(name, None) for name in _KEY_OPTIONS}
        use_key({name: value for name, value in given.items() if value is not None})
        if given["key"] is not None:
            named = arguments.get("endpoints") or [
                arguments.get("http_for") or arguments.get("endpoint") or arguments.get("target")
            ]
            note_unused_key([each for each in named if each])
        return command(*own, **arguments)

    made = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, option],
        )
        for name, option in _KEY_OPTIONS.items()
    ]
    parameters = [*inspect.signature(command).parameters.values(), *made]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def example(*lines: str) -> str:
    """Return the epilog of a command's help, with example command lines."""
    return "\b\nExample:\n" + "\n".join("  " + line for line in lines)
