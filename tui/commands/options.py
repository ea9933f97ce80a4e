"""Command-line options made from the annotated fields of a msgspec Struct.

One table of fields, `EngineConfig` for example, makes the options, their help, the keys of the
config file and the names in the environment.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import FieldInfo

from stepscope.engine.protocol.config import Knobs
from stepscope.tui.commands.durations import milliseconds
from stepscope.tui.commands.errors import WrongUsage
from stepscope.tui.settings import (
    SECTIONS,
    Section,
    config_path,
    environment_name,
    from_environment,
    load_settings,
)

# What a command runs with, where it is not what the options say of themselves.
DEMO_DEFAULTS = {"slo_ttft_ms": 3000.0, "slo_itl_ms": 150.0}
HTTP_DEFAULTS = {"bind": "127.0.0.1:8000"}
_OWN_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "http": HTTP_DEFAULTS,
    "demo": DEMO_DEFAULTS,
    "schedule": dict.fromkeys(Knobs.__struct_fields__),  # the workload's own
}
_NOTES = {
    "demo": "The engine runs with a budget of 128 tokens, 12 seats and, with the demo model, "
    "a 64 MB cache. It gets 70 % of what this machine carries to do, also when that changes, until "
    "you change a knob or the workload; or what --rate says.",
    "replay": "A recording that carries service levels is shown with them, unless an option says "
    "otherwise.",
    "compare": "Recordings that carry service levels are judged by them, by those of A where both "
    "do, unless an option says otherwise.",
    "schedule": "Options win over the workload; changes of its budget in mid-run still happen. "
    "What neither says is as 'stepscope serve' has it, but the order is arrival, as in vLLM.",
}

# Where a field goes by another name on the command line.
_OWN_FLAGS: dict[str, Mapping[str, str]] = {
    "serve": {"bind": "--http"},
}
# Durations, which may have a unit on the command line; the other name is not told of any more.
_DURATIONS: Mapping[str, str] = {"slo_ttft_ms": "--slo-ttft", "slo_itl_ms": "--slo-itl"}
_OLD = "old_"

_S = TypeVar("_S", bound=Struct)
_KINDS: dict[object, tuple[str, str]] = {
    bool: ("", "true or false"),
    int: ("INT", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("TEXT", "text"),
}


def with_options(*sections: Section) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every field of these sections as an option.

    The command takes them as its keyword argument `flags`: only those that were given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "flags"
        ]
        defaults = _OWN_DEFAULTS.get(command.__name__, {})
        names = _OWN_FLAGS.get(command.__name__, {})
        made = {
            field.name: _parameter(
                field,
                defaults.get(field.name, field.default),
                names.get(field.name, _flag(field.name)),
            )
            for section in sections
            for field in msgspec.structs.fields(SECTIONS[section])
            if not _is_table(field)
        }
        old = {_OLD + name: _old_parameter(name) for name in made if name in _DURATIONS}

        def run(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in made}
            for name in old:
                value = arguments.pop(name)
                flags[name.removeprefix(_OLD)] = flags[name.removeprefix(_OLD)] or value
            given = {name: value for name, value in flags.items() if value is not None}
            command(**arguments, flags=given)

        parameters = [*own, *made.values(), *old.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__ = command.__name__
        notes = [_NOTES[command.__name__]] if command.__name__ in _NOTES else []
        run.__doc__ = "\n\n".join([inspect.cleandoc(command.__doc__ or ""), *notes])
        return run

    return decorate


def resolve(
    kind: type[_S],
    section: Section,
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> _S:
    """The Struct of a section: flag over environment over file over `defaults` over its own.

    Raises:
        WrongUsage: a value that the field does not take; the message says where it came from.
    """
    chosen = settled(kind, section, flags, defaults)
    return kind(**{name: each.value for name, each in chosen.items() if each.origin})


class Setting(NamedTuple):
    """The value of a field, and who said so: empty where nobody did."""

    value: Any
    origin: str


def settled(
    kind: type[Struct],
    section: Section,
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Setting]:
    """Every field of a section with where its value comes from; arguments and errors of `resolve`.

    The origin is an option, a name in the environment, `config.toml` or `the default`.
    """
    from_file = load_settings()[section]
    found: dict[str, Setting] = {}
    for field in msgspec.structs.fields(kind):
        name = field.name
        if name in flags:
            value, origin = flags[name], _flag(name)
        elif (value := from_environment(section, name)) is not None:
            origin = environment_name(section, name)
        elif name in from_file:
            # It has been checked when the file was read, with the name of the file.
            value, origin = from_file[name], config_path().name
        elif defaults and name in defaults:
            value, origin = defaults[name], "the default"
        else:
            found[name] = Setting(_default(field), "")
            continue
        found[name] = Setting(_converted(field, value, origin), origin)
    return found


def _default(field: FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return None if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def convert_flags(kind: type[Struct], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the options that were given, and of nothing else.

    Raises:
        WrongUsage: a value that the field does not take.
    """
    return {
        field.name: _converted(field, flags[field.name], _flag(field.name))
        for field in msgspec.structs.fields(kind)
        if field.name in flags
    }


def _converted(field: FieldInfo, value: Any, source: str) -> Any:
    if isinstance(value, str) and _is_list(field):
        value = value.replace(",", " ").split()
    if isinstance(value, str) and field.name in _DURATIONS:
        value = milliseconds(source, value)
    try:
        return msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError:
        raise WrongUsage(f"{source}: expected {_expected(field)}, got {value!r}") from None


def _parameter(field: FieldInfo, default: Any, flag: str) -> inspect.Parameter:
    base, meta = base_and_meta(field)
    names = [flag]
    if base is bool:
        names = [f"{names[0]}/{_flag('no_' + field.name)}"]
    metavar = "|".join(get_args(base)) if get_origin(base) is Literal else _KINDS[base][0]
    description = meta.description or ""
    if field.name in _DURATIONS:
        metavar, description = "TIME", description.removesuffix(", in ms")
    if "default:" not in description and default not in ("", None):
        text = f"{default:g}" if base is float else str(default)
        text = text.lower() if base is bool else text
        text += "ms" if field.name in _DURATIONS else ""
        description += f"  [default: {text}]"
    option = typer.Option(
        *names, help=description, metavar=metavar or None, show_default=False, parser=None
    )
    # Values are taken as text and checked in `resolve`, where their source is known.
    value_type = bool if base is bool else str
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[value_type | None, option],
    )


def _old_parameter(name: str) -> inspect.Parameter:
    """The name that an option had before."""
    option = typer.Option("--" + name.replace("_", "-"), hidden=True)
    return inspect.Parameter(
        _OLD + name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def base_and_meta(field: FieldInfo) -> tuple[Any, msgspec.Meta]:
    """The plain type of a field, and its bounds and description."""
    kind = next((each for each in get_args(field.type) if get_origin(each) is Annotated), None)
    base, meta = get_args(kind if kind is not None else field.type)
    return base, meta


def _is_table(field: FieldInfo) -> bool:
    return get_origin(base_and_meta(field)[0]) is dict


def _is_list(field: FieldInfo) -> bool:
    return get_origin(base_and_meta(field)[0]) is tuple


def _expected(field: FieldInfo) -> str:
    base, meta = base_and_meta(field)
    if _is_list(field):
        return "texts with commas between them"
    if get_origin(base) is Literal:
        return "one of " + ", ".join(get_args(base))
    bounds = []
    if meta.gt is not None:
        bounds.append(f"above {_number(meta.gt)}")
    if meta.ge is not None:
        bounds.append(f"of at least {_number(meta.ge)}")
    if meta.le is not None:
        bounds.append(f"of at most {_number(meta.le)}")
    if meta.max_length is not None:
        bounds.append(f"of at most {meta.max_length} characters")
    return " ".join([_KINDS[base][1], " and ".join(bounds)]).strip()


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _flag(name: str) -> str:
    return _DURATIONS.get(name) or "--" + name.replace("_", "-")
