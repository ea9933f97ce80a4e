"""Command-line options made from the annotated fields of a msgspec Struct.

One Struct, for example `EngineConfig`, defines the options, their help, the keys of the config file
and the environment variables.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer
from msgspec.structs import FieldInfo

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.tui.settings.setting_values import DURATIONS, KINDS, base_and_meta, flag_of
from stepscope.tui.settings.settings import (
    SECTIONS,
    Section,
)

# Defaults of a command that differ from those of its fields.
DEMO_DEFAULTS = {"slo_ttft_ms": 3000.0, "slo_itl_ms": 150.0}
# Decodes beside chunks of 64 keep these levels; decodes beside a whole prompt of 900 do not.
TOUR_DEFAULTS = {"slo_ttft_ms": 1000.0, "slo_itl_ms": 50.0}
HTTP_DEFAULTS = {"bind": "127.0.0.1:8000"}
SIMULATE_DEFAULTS = {"rate": 8.0, "num_requests": 300}
_OWN_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "http": HTTP_DEFAULTS,
    "demo": DEMO_DEFAULTS,
    "tour": TOUR_DEFAULTS,
    "simulate": SIMULATE_DEFAULTS,
    "schedule": dict.fromkeys(Knobs.__struct_fields__),  # the workload's own
}
_NOTES = {
    "demo": "The engine runs with a budget of 64 tokens, at most 16 running requests and, for "
    "the demo model, a 64 MB KV cache. 12 requests are under way all the time, or fewer with "
    "--rate. With --simulate it is another demo: 10 requests a second at a budget of 2,048 tokens, "
    "with service levels of 500 ms (TTFT) and 50 ms (ITL).",
    "replay": "The service levels in the recording apply, unless an option sets others.",
    "compare": "The service levels in the recordings apply, A's if both have them, unless an "
    "option sets others.",
    "schedule": "Options override the workload file, but budget changes in mid-run still happen. "
    "What neither sets is as in 'stepscope serve'.",
}

# Fields that have another name on the command line.
_OWN_FLAGS: dict[str, Mapping[str, str]] = {
    "serve": {"bind": "--http"},
}
_OLD = "old_"


def with_options(*sections: Section) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds all settings of these config sections to a command, as options.

    The command receives the options that were given as its keyword argument `flags`.
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
                names.get(field.name, flag_of(field.name)),
            )
            for section in sections
            for field in msgspec.structs.fields(SECTIONS[section])
            if not _is_table(field)
        }
        old = {_OLD + name: _old_parameter(name) for name in made if name in DURATIONS}

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


def _parameter(field: FieldInfo, default: Any, flag: str) -> inspect.Parameter:
    base, meta = base_and_meta(field)
    names = [flag]
    if base is bool:
        names = [f"{names[0]}/{flag_of('no_' + field.name)}"]
    metavar = "|".join(get_args(base)) if get_origin(base) is Literal else KINDS[base][0]
    description = meta.description or ""
    if field.name in DURATIONS:
        metavar, description = "TIME", description.removesuffix(", in ms")
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
