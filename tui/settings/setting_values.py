"""Finds the value of each setting: option, then environment, then config file, then default.

Each value is checked. An error names the place where the value came from.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo

from stepscope.engine.protocol.engine_config import MAX_LEVEL_MS
from stepscope.recordings.state.latency import SLO
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.settings import (
    Section,
    config_path,
    environment_name,
    from_environment,
    load_settings,
)

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "": 1.0}


def in_milliseconds(text: str) -> float | None:
    """Parse a duration such as 50ms, 0.5s or 50 (ms). None if the text is no duration above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|)", text.strip())
    value = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    return value if 0 < value < math.inf else None


def milliseconds(option: str, text: str) -> float:
    """Parse the duration given to an option, in ms; raise WrongUsage if it is none above zero."""
    value = in_milliseconds(text)
    if value is None:
        raise WrongUsage(f"{option}: expected a duration such as 50ms or 0.5s, got {text!r}")
    return value


# Durations: on the command line they may have a unit, so their options are named without `_ms`.
DURATIONS: Mapping[str, str] = {"slo_ttft_ms": "--slo-ttft", "slo_itl_ms": "--slo-itl"}
_FLAGS = {**DURATIONS, "bind": "--http"}

_S = TypeVar("_S", bound=Struct)
KINDS: dict[object, tuple[str, str]] = {
    bool: ("", "true or false"),
    int: ("INT", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("TEXT", "text"),
}


def resolve(
    kind: type[_S],
    section: Section,
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> _S:
    """Build the Struct of a config section, such as `DashboardSettings`, from all its sources.

    An option comes first, then environment, config file, `defaults` (of the command), and the
    default of the field. WrongUsage: a value does not fit; the message says where it came from.
    """
    chosen = settled(kind, section, flags, defaults)
    return kind(**{name: each.value for name, each in chosen.items() if each.origin})


class ResolvedSetting(NamedTuple):
    """A value, and where it comes from: an option, a variable, a file; empty: the field itself."""

    value: Any
    origin: str


def settled(
    kind: type[Struct],
    section: Section,
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, ResolvedSetting]:
    """Return the value of every field of a section, by name; arguments and errors as `resolve`."""
    from_file, usual = load_settings()[section], kind()
    found: dict[str, ResolvedSetting] = {}
    for field in msgspec.structs.fields(kind):
        name = field.name
        if name in flags:
            value, origin = flags[name], flag_of(name)
        elif (value := from_environment(section, name)) is not None:
            origin = environment_name(section, name)
        elif name in from_file:
            # `load_settings` has checked it already, and would have named the file in its error.
            value, origin = from_file[name], config_path().name
        elif defaults and name in defaults:
            value, origin = defaults[name], "the default"
        else:
            found[name] = ResolvedSetting(getattr(usual, name), "")
            continue
        found[name] = ResolvedSetting(_converted(field, value, origin), origin)
    return found


def convert_flags(kind: type[Struct], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, converted, or raise WrongUsage."""
    return {
        field.name: _converted(field, flags[field.name], flag_of(field.name))
        for field in msgspec.structs.fields(kind)
        if field.name in flags
    }


def _converted(field: FieldInfo, value: Any, source: str) -> Any:
    if isinstance(value, str) and _is_list(field):
        value = value.replace(",", " ").split()
    if isinstance(value, str) and field.name in DURATIONS:
        value = milliseconds(source, value)
    try:
        return msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError:
        raise WrongUsage(f"{source}: expected {_expected(field)}, got {value!r}") from None


def base_and_meta(field: FieldInfo) -> tuple[Any, msgspec.Meta]:
    """Return a field's type without annotations, and its `Meta` (bounds and description)."""
    kind = next((each for each in get_args(field.type) if get_origin(each) is Annotated), None)
    base, meta = get_args(kind if kind is not None else field.type)
    return base, meta


def _is_list(field: FieldInfo) -> bool:
    return get_origin(base_and_meta(field)[0]) is tuple


def _expected(field: FieldInfo) -> str:
    base, meta = base_and_meta(field)
    if _is_list(field):
        return "texts with commas between them"
    if get_origin(base) is Literal:
        return "one of " + ", ".join(get_args(base))
    bounds = (
        (meta.gt, "above {}"),
        (meta.ge, "of at least {}"),
        (meta.le, "of at most {}"),
        (meta.max_length, "of at most {} characters"),
    )
    texts = [
        text.format(str(n) if isinstance(n, int) else f"{n:g}")
        for n, text in bounds
        if n is not None
    ]
    return " ".join([KINDS[base][1], " and ".join(texts)]).strip()


def flag_of(name: str) -> str:
    return _FLAGS.get(name) or "--" + name.replace("_", "-")


EXAMPLE = "ttft=500 itl=50"


def parse_levels(text: str, now: SLO) -> SLO:
    """Parse levels; one that is not named stays as `now`. ValueError says what to write."""
    found: dict[str, float] = {}
    for word in text.lower().split():
        name, _, value = word.partition("=")
        milliseconds = in_milliseconds(value)
        is_level = milliseconds is not None and milliseconds <= MAX_LEVEL_MS
        if name not in ("ttft", "itl") or milliseconds is None or not is_level:
            raise ValueError(f"{word!r}: write {EXAMPLE}, above 0 and in ms, or ttft=0.5s")
        found[f"{name}_ms"] = milliseconds
    if not found:
        raise ValueError(f"write {EXAMPLE}, in ms, or ttft=0.5s")
    return now._replace(**found)


def said(slo: SLO) -> str:
    return f"TTFT within {slo.ttft_ms:,g} ms, ITL within {slo.itl_ms:,g} ms"
