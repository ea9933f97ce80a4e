"""Reads the user's config file and checks all of it before any value is used.

Each key of a section is also an option of the commands that use the section, written there with `-`
for `_`. An option comes before the environment (`STEPSCOPE_<SECTION>_<KEY>`), and that before the
file. The keys of section `[keys]` are not options: they set the keys of actions in the dashboard.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import platformdirs
from msgspec import Meta, Struct

from stepscope.engine.http.settings import HttpSettings
from stepscope.engine.protocol.engine_config import MAX_LEVEL_MS, EngineConfig
from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.tui.settings.cli_errors import WrongUsage

if TYPE_CHECKING:
    from stepscope.recordings.alerts.rule import Rule
    from stepscope.tui.settings.action_table import Action

Section: TypeAlias = Literal["serve", "knobs", "http", "dashboard", "fleet", "load", "client"]
KEYS = "keys"
ALERTS = "alerts"  # an array of tables with one rule each


def _level(what: str, default: int) -> Meta:
    by = f"(default: as the engine or the recording says, else {default})"
    return Meta(gt=0, le=MAX_LEVEL_MS, description=f"{what} is a breach, in ms {by}")


_Fps: TypeAlias = Annotated[
    float, Meta(ge=0.5, le=60, description="frames a second (default: 10, over SSH 5)")
]
_Ascii: TypeAlias = Annotated[
    bool, Meta(description="draw with ASCII characters only (default: as the terminal can)")
]
_Log: TypeAlias = Annotated[
    str, Meta(description="log file for errors (default: dashboard.log in the state folder)")
]


class DashboardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the dashboard looks, and the service levels for TTFT and ITL."""

    fps: _Fps | None = None
    theme: Annotated[Literal["dark", "light"], Meta(description="colours at the start")] = "dark"
    ascii: _Ascii | None = None
    sort: Annotated[
        Literal["arrival", "state", "blocks", "latest"], Meta(description="order of the lanes")
    ] = "arrival"
    axis: Annotated[
        Literal["step", "time"], Meta(description="what a column of the charts stands for")
    ] = "step"
    readonly: Annotated[
        bool,
        Meta(
            description="hide and disable everything that changes the engine or the config file; "
            "R, D, S and M still write their files"
        ),
    ] = False
    slo_ttft_ms: Annotated[float, _level("a first token that takes longer", 500)] | None = None
    slo_itl_ms: Annotated[float, _level("a longer gap between two tokens", 50)] | None = None
    keep: Annotated[
        bool, Meta(description="save settings changed in the dashboard to the config file")
    ] = True
    log: _Log | None = None


class FleetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines that `stepscope top` shows if the command names none."""

    engines: Annotated[
        tuple[str, ...],
        Meta(description="endpoints to show side by side (default: those of this machine)"),
    ] = ()


class ClientSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who the operator is: a name, and a key for engines that ask for one."""

    key: Annotated[
        str,
        Meta(
            description="key file from 'stepscope keys new', for an engine that asks for one "
            "(default: the one in the config folder's keys/ that fits)"
        ),
    ] = ""
    name: Annotated[
        str,
        Meta(
            max_length=40,
            description="your name in the audit (default: account, terminal and machine)",
        ),
    ] = ""


class _Alert(Struct, forbid_unknown_fields=True):
    when: str


SECTIONS: dict[Section, type[Struct]] = {
    "serve": EngineConfig,
    "knobs": Knobs,
    "http": HttpSettings,
    "dashboard": DashboardSettings,
    "fleet": FleetSettings,
    "load": WorkloadSpec,
    "client": ClientSettings,
}


def config_path() -> Path:
    """Return the path of the config file, which may not exist; `STEPSCOPE_CONFIG` overrides it."""
    named = os.environ.get("STEPSCOPE_CONFIG")
    if named:
        return Path(os.devnull) if named == "none" else Path(named).expanduser()
    return platformdirs.user_config_path("stepscope") / "config.toml"


def load_settings() -> dict[str, dict[str, Any]]:
    """Return the sections of the config file; WrongUsage names what is not valid."""
    path = config_path()
    document = _document(path)
    names: dict[str, Section] = {name: name for name in SECTIONS}
    for section, values in document.items():
        if section == ALERTS:
            _rules(path, values)
            continue
        if section not in names and section != KEYS:
            known = ", ".join(f"[{name}]" for name in (*SECTIONS, KEYS))
            raise WrongUsage(f"{path}: unknown key {section!r}; the sections are {known}")
        if not isinstance(values, dict):
            raise WrongUsage(f"{path}: {section} is a section: write [{section}]")
        if section == KEYS:
            _actions(path, values)
        else:
            _check(path, names[section], values)
    return {section: document.get(section, {}) for section in (*SECTIONS, KEYS)}


def load_actions() -> "tuple[Action, ...]":
    """Return the action table with the keys of the config file; raises as `load_settings` does."""
    return _actions(config_path(), load_settings()[KEYS])


def load_alerts() -> "tuple[Rule, ...]":
    """Return the rules of the `[[alerts]]` tables; raise WrongUsage if one is not valid."""
    path = config_path()
    return _rules(path, _document(path).get(ALERTS, []))


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WrongUsage(f"{path}: {error}") from error


def from_environment(section: Section, key: str) -> str | None:
    return os.environ.get(environment_name(section, key))


def unknown_variables() -> list[str]:
    """Return environment variables that look like settings of our sections, but name no setting."""
    known = {
        environment_name(section, field.name)
        for section, kind in SECTIONS.items()
        for field in msgspec.structs.fields(kind)
    }
    ours = tuple(environment_name(section, "") for section in SECTIONS)
    return sorted(name for name in os.environ if name.startswith(ours) and name not in known)


def environment_name(section: Section, key: str) -> str:
    return f"STEPSCOPE_{section}_{key}".upper()


def _actions(path: Path, lines: Mapping[str, object]) -> "tuple[Action, ...]":
    from stepscope.tui.settings.actions import remapped  # most commands need no keys
    from stepscope.tui.settings.key_names import KeyNameError

    try:
        return remapped(lines)
    except KeyNameError as error:
        raise WrongUsage(f"{path}: {error}") from error


def _rules(path: Path, tables: object) -> "tuple[Rule, ...]":
    from stepscope.recordings.alerts.rule import parse_rule
    from stepscope.recordings.figures import BoundError

    try:
        found = msgspec.convert(tables, list[_Alert])
        return tuple(parse_rule(each.when) for each in found)
    except msgspec.ValidationError as error:
        example = '[[alerts]] with when = "itl_p99 > 50ms for 30s"'
        raise WrongUsage(f"{path}: {ALERTS}{in_words(error).text}: write {example}") from error
    except BoundError as error:
        raise WrongUsage(f"{path}: [[alerts]] when: {error}") from error


def _check(path: Path, section: Section, values: dict[str, Any]) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(SECTIONS[section])}
    for key, value in values.items():
        if key not in fields:
            known = ", ".join(fields)
            raise WrongUsage(f"{path}: unknown key {key!r} in [{section}]; there are: {known}")
        try:
            msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError as error:
            raise WrongUsage(
                f"{path}: [{section}] {key} = {value!r}: {in_words(error).message}"
            ) from error
