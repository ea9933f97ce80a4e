"""Arguments and options of commands; those of a config section are made from its Struct.

One Struct, for example `EngineConfig`, defines the options, their help, the keys of the config file
and the environment variables.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer
from msgspec.structs import FieldInfo

from stepscope.tui.settings.cli_errors import WRONG_USAGE, WrongUsage
from stepscope.tui.settings.setting_values import DURATIONS, KINDS, base_and_meta, flag_of
from stepscope.tui.settings.settings import SECTIONS, Section

_OLD = "old_"


def with_options(
    *sections: Section,
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds all settings of these config sections to a command, as options.

    The command receives the options that were given as its keyword argument `flags`; another
    command that calls it may give `flags` itself.

    Args:
        defaults: defaults of the command that differ from those of the fields.
        names: other names of options, by field.
    """
    own, flag_names = defaults or {}, names or {}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        made = {
            field.name: _parameter(
                field,
                own.get(field.name, field.default),
                field.name in own,
                flag_names.get(field.name, flag_of(field.name)),
            )
            for section in sections
            for field in msgspec.structs.fields(SECTIONS[section])
            if not _is_table(field)
        }
        old = {_OLD + name: _old_parameter(name) for name in made if name in DURATIONS}

        def run(*arguments: Any, flags: Mapping[str, Any] | None = None, **named: Any) -> Any:
            given = {name: value for name in made if (value := named.pop(name, None)) is not None}
            for name in old:
                if (value := named.pop(name, None)) is not None:
                    given.setdefault(name.removeprefix(_OLD), value)
            return command(*arguments, **named, flags=given if flags is None else flags)

        first = [
            each for each in inspect.signature(command).parameters.values() if each.name != "flags"
        ]
        parameters = [*first, *made.values(), *old.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        return run

    return decorate


def _parameter(field: FieldInfo, default: Any, is_own: bool, flag: str) -> inspect.Parameter:
    base, meta = base_and_meta(field)
    names = [flag]
    if base is bool:
        names = [f"{names[0]}/{flag_of('no_' + field.name)}"]
    metavar = "|".join(get_args(base)) if get_origin(base) is Literal else KINDS[base][0]
    description = meta.description or ""
    if field.name in DURATIONS:
        metavar, description = "TIME", description.removesuffix(", in ms")
    if is_own:
        description = re.sub(r" \(default: [^)]*\)", "", description)
    if "default:" not in description and default not in ("", None):
        text = f"{default:g}" if base is float else str(default)
        text = text.lower() if base is bool else text
        text += "ms" if field.name in DURATIONS else ""
        description += f"  [default: {text}]"
    option = typer.Option(
        *names, help=description, metavar=metavar or None, show_default=False, parser=None
    )
    # Values stay text here; `resolve` checks them, because it knows where they came from.
    value_type = bool if base is bool else str
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[value_type | None, option],
    )


def _old_parameter(name: str) -> inspect.Parameter:
    """Return a hidden option under the former name of a duration, which had its unit (`..._ms`)."""
    option = typer.Option("--" + name.replace("_", "-"), hidden=True)
    return inspect.Parameter(
        _OLD + name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _is_table(field: FieldInfo) -> bool:
    return get_origin(base_and_meta(field)[0]) is dict


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


def check_seconds(seconds: float | None) -> None:
    """Raise WrongUsage if `--seconds` is given and not above 0."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise WrongUsage(f"--seconds: expected a number above 0, got {seconds:g}")


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
