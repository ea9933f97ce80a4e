"""Command-line options made from the annotated fields of a msgspec Struct.

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
