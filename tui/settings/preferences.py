"""`Preferences`: saves the settings that the operator changes, for the next session.

The config file keeps its order, its comments and its blank lines.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = str | bool | float

log = logging.getLogger("stepscope.tui")


class ConfigFileError(Exception):
    """The config file cannot be changed; the message says why in one line."""


def changed(path: Path, section: str, values: Mapping[str, Value]) -> None:
    """Set keys of a section, all or, with ConfigFileError, none; a link and comments stay."""
    import tomlkit  # only a change needs it
    from tomlkit.exceptions import TOMLKitError

    real = path.resolve()
    unfinished = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        document = tomlkit.parse(real.read_text("utf-8") if real.exists() else "")
        table = document.setdefault(section, tomlkit.table())
        if not isinstance(table, dict):
            raise ConfigFileError(f"{path}: {section} is not a section")
        table.update(values)
        real.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(tomlkit.dumps(document), "utf-8")
        if real.exists():
            shutil.copymode(real, unfinished)
        unfinished.replace(real)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise ConfigFileError(f"{error.filename or path}: {error.strerror}") from error
    except (TOMLKitError, ValueError) as error:
        raise ConfigFileError(f"{path} is not TOML: {error}") from error


class Preferences:
    """Settings of `[dashboard]` that the operator has changed; `save` writes them when it ends.

    Args:
        path: the config file; None: nothing is saved.
        began: the settings with which the dashboard was started. Only these can be saved.
    """

    def __init__(
        self, path: Path | None = None, began: Mapping[str, Value | None] | None = None
    ) -> None:
        self._path = path
        self._began = dict(began or {})
        self._changes: dict[str, Value] = {}

    def has(self, name: str) -> bool:
        return name in self._began

    def set(self, name: str, value: Value) -> None:
        self._changes[name] = value

    def save(self) -> str | None:
        """Write the changed settings; return why that failed, in one line, or None."""
        changes = {
            name: value for name, value in self._changes.items() if value != self._began.get(name)
        }
        if self._path is None or not changes:
            return None
        try:
            changed(self._path, "dashboard", changes)
        except ConfigFileError as error:
            log.warning("settings are not kept: %s", error)
            return f"settings are not kept: {error}"
        self._began |= changes
        return None
