"""`CliCommand`: a function with its arguments and options; those of config sections are made here.

One Struct, for example `EngineConfig`, defines the options, their help, the keys of the config file
and the environment variables.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer
from msgspec.structs import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

from stepscope.engine.protocol.commands import MAX_PAST_S
from stepscope.recordings.samples import SHOWS
from stepscope.tui.settings.setting_values import DURATIONS, KINDS, base_and_meta, flag_of
from stepscope.tui.settings.settings import SECTIONS, Section


class CliCommand:
    """A function that the command line calls with its options; Python calls it like the function.

    Args:
        sections: config sections, or parts of them; their settings become options, and those that
            were given arrive as the keyword argument `flags`.
        defaults: defaults of the command that differ from those of the fields.
        takes_key: whether to add the options about keys, because it connects to engines.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        examples: Sequence[str],
        name: str | None = None,
        sections: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        takes_key: bool = False,
        **rest: Any,
    ) -> None:
        self.body = body
        self._fields = [field for section in sections for field in _fields(section)]
        self._defaults = defaults or {}
        self._key_fields = _fields("key") if takes_key else []
        epilog = "\n  ".join(["\b\nExample:", *examples]) if examples else None
        self._rest = {"name": name, "epilog": epilog, **rest}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = inspect.signature(self.body).bind_partial(*arguments, **named)
        for name, each in given.signature.parameters.items():
            if isinstance(each.default, OptionInfo | ArgumentInfo):
                given.arguments.setdefault(name, each.default.default)
        return self.body(*given.args, **given.kwargs)

    def add_to(self, app: typer.Typer) -> typer.Typer:
        def body(**named: Any) -> Any:
            return self.run(named)

        parameters = self.parameters()
        body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        body.__annotations__ = {each.name: each.annotation for each in parameters}
        body.__name__, body.__doc__ = self.body.__name__, self.body.__doc__
        app.command(**self._rest)(body)
        return app

    def parameters(self) -> list[inspect.Parameter]:
        own = inspect.signature(self.body).parameters.values()
        of_fields = map(self._of_field, (*self._fields, *self._key_fields))
        return [*(each for each in own if each.name != "flags"), *of_fields]

    def run(self, named: dict[str, Any]) -> Any:
        """Call the function with the options by name, as the command line gave them."""
        if self._key_fields:
            from stepscope.tui.cli.shared.connect import use_key  # loads sockets

            use_key(_given(self._key_fields, named))
        if self._fields:
            named["flags"] = _given(self._fields, named)
        return self.body(**named)

    def _of_field(self, field: FieldInfo) -> inspect.Parameter:
        """The option of a setting. Its value stays text: `resolve` checks it."""
        base, meta = base_and_meta(field)
        flag, is_bool = flag_of(field.name), base is bool
        default = self._defaults.get(field.name, field.default)
        metavar = "|".join(get_args(base)) if get_origin(base) is Literal else KINDS[base][0]
        help = meta.description or ""
        if field.name in DURATIONS:
            metavar, help = "TIME", help.replace(", in ms", "")
        if field.name in self._defaults:
            help = re.sub(r" \(default: [^)]*\)", "", help)
        if "default:" not in help and default not in ("", None):
            text = f"{default:g}" if base is float else str(default)
            text = text.lower() if is_bool else text
            help += f"  [default: {text}{'ms' if field.name in DURATIONS else ''}]"
        option = typer.Option(
            f"{flag}/{flag_of('no_' + field.name)}" if is_bool else flag,
            help=help,
            metavar=metavar or None,
            show_default=False,
        )
        kind: Any = bool if is_bool else str
        annotation = Annotated[kind | None, option]
        only_named = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(field.name, only_named, default=None, annotation=annotation)


def _given(fields: Sequence[FieldInfo], named: dict[str, Any]) -> dict[str, Any]:
    """Take the options of these fields out of all, and return those that were given."""
    values = {field.name: named.pop(field.name, None) for field in fields}
    return {name: value for name, value in values.items() if value is not None}


# Parts of sections; only these settings become options.
_PARTS: Mapping[str, tuple[Section, Collection[str]]] = {
    "levels": ("dashboard", DURATIONS),
    "picture": ("dashboard", ("theme", "ascii", "axis", *DURATIONS)),
    "key": ("client", ("key",)),
}


def _fields(section: str) -> list[FieldInfo]:
    whole, names = _PARTS.get(section, (section, ()))
    kinds: Mapping[Any, type[msgspec.Struct]] = SECTIONS
    found = msgspec.structs.fields(kinds[whole])
    found = tuple(each for each in found if not names or each.name in names)
    return [each for each in found if get_origin(base_and_meta(each)[0]) is not dict]


def command(*examples: str, **rest: Any) -> Callable[[Callable[..., Any]], CliCommand]:
    """Return a decorator that makes a function a `CliCommand`, which says what `rest` may be."""
    return lambda body: CliCommand(body, examples, **rest)


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Return options for another process of ours, from their values by field name."""
    found: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            name, value = (name if value else f"no_{name}"), None
        found.append(flag_of(name))
        found += [] if value is None else [str(value)]
    return found


def argument(metavar: str, help: str, *, default: Any = None, **rest: Any) -> Any:
    """Return an argument, as the default of a parameter; `...` if it must be given."""
    return typer.Argument(default, metavar=metavar, help=help, **rest)


def option(metavar: str, help: str, *names: str, default: Any = None, **rest: Any) -> Any:
    """Return an option with a value; `rest` is what typer takes besides, such as `min`, `max`."""
    return typer.Option(default, *names, metavar=metavar, help=help, **rest)


def seconds_option(help: str, default: Any = None) -> Any:
    return option("NUMBER", help, default=default, min=0.001)


def flag(help: str, *names: str, default: Any = False) -> Any:
    """Return an option without a value; `names` if it is not named after its parameter."""
    return typer.Option(default, *names, help=help)


# Types of parameters that several commands have, each with a default of its own.
_argument, _option, _flag = (partial(each, default=...) for each in (argument, option, flag))
_SAMPLES = f"a shipped sample ({', '.join(SHOWS)})"
_ENGINE = "name of a local engine, ipc://PATH or tcp://HOST:PORT (default: the only local one)"
_LIKE = """begin with another engine's defaults: vllm, sglang, mini-sglang or tensorrt-llm, \
also on a class of GPU (vllm/b200)"""
_TARGET = f"a recording, {_SAMPLES} or an engine (default: the only local engine)"
_LAST = "only the last seconds (default: the whole recording, or a minute of an engine)"
_PAST = "begin with this much of the engine's past, as far as it keeps it"
EngineName = Annotated[str | None, _argument("ENDPOINT", _ENGINE)]
Like = Annotated[str | None, _option("ENGINE", _LIKE)]
Past = Annotated[float, _option("SECONDS", _PAST, min=0, max=MAX_PAST_S)]
Wait = Annotated[bool, _flag("wait for an engine that is not there yet", "--wait/--no-wait")]
RecordingFile = Annotated[str, _argument("FILE", f"a recording, or {_SAMPLES}")]
FirstStep = Annotated[int | None, _option("STEP", "the first step to take", "--from", min=0)]
LastStep = Annotated[int | None, _option("STEP", "the last step to take", "--until", min=0)]
Target = Annotated[str | None, _argument("FILE|ENDPOINT", _TARGET)]
LastSeconds = Annotated[float | None, seconds_option(_LAST, default=...)]
AsJson = Annotated[bool, _flag("print everything as one JSON document", "--json")]
