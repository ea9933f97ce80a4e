"""`Settings`: the user's config file, checked whole before anything of it is used.

One file with a few sections; a key of a section is an option of the commands it belongs to, with
underscores. What wins is always: flag, then environment (`STEPSCOPE_<SECTION>_<KEY>`), then file.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import platformdirs
from msgspec import Meta, Struct

from stepscope.engine.commands import WorkloadSpec
from stepscope.engine.config import EngineConfig, Knobs
from stepscope.engine.http.settings import HttpSettings
from stepscope.tui.cli_errors import WrongUsage

Section: TypeAlias = Literal["serve", "knobs", "http", "dashboard", "load"]


class DashboardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the dashboard looks, and which latencies are good enough."""

    fps: (
        Annotated[
            float,
            Meta(ge=0.5, le=60, description="frames a second (default: 10, over SSH 5)"),
        ]
        | None
    ) = None
    theme: Annotated[Literal["dark", "light"], Meta(description="colours to begin with")] = "dark"
    ascii: Annotated[bool, Meta(description="draw with ASCII characters only")] = False
    readonly: Annotated[
        bool, Meta(description="hide and disable everything that changes the engine")
    ] = False
    slo_ttft_ms: Annotated[
        float, Meta(gt=0, description="a first token that takes longer is a breach, in ms")
    ] = 500.0
    slo_itl_ms: Annotated[
        float, Meta(gt=0, description="a longer gap between two tokens is a breach, in ms")
    ] = 50.0


SECTIONS: dict[Section, type[Struct]] = {
    "serve": EngineConfig,
    "knobs": Knobs,
    "http": HttpSettings,
    "dashboard": DashboardSettings,
    "load": WorkloadSpec,
}


def config_path() -> Path:
    """Where the file is looked for; it need not exist."""
    return platformdirs.user_config_path("stepscope") / "config.toml"


def load_settings(path: Path | None = None) -> dict[Section, dict[str, Any]]:
    """The sections of the file, every key known and every value checked.

    Raises:
        WrongUsage: it is not TOML, or a section, a key or a value is not one; the message names it.
    """
    path = path or config_path()
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        document = {}
    except (OSError, ValueError) as error:
        raise WrongUsage(f"{path}: {error}") from error
    for section, values in document.items():
        if section not in SECTIONS:
            known = ", ".join(f"[{name}]" for name in SECTIONS)
            raise WrongUsage(f"{path}: unknown key {section!r}; the sections are {known}")
        if not isinstance(values, dict):
            raise WrongUsage(f"{path}: {section} is a section: write [{section}]")
        _check(path, section, values)
    return {section: document.get(section, {}) for section in SECTIONS}


def from_environment(section: Section, key: str) -> str | None:
    """The environment's word for one option."""
    return os.environ.get(environment_name(section, key))


def environment_name(section: Section, key: str) -> str:
    return f"STEPSCOPE_{section}_{key}".upper()


def _check(path: Path, section: Section, values: dict[str, Any]) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(SECTIONS[section])}
    for key, value in values.items():
        if key not in fields:
            known = ", ".join(fields)
            raise WrongUsage(f"{path}: unknown key {key!r} in [{section}]; there are: {known}")
        try:
            msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError as error:
            raise WrongUsage(f"{path}: [{section}] {key} = {value!r}: {error}") from error
