"""`Preferences`: saves the settings that the operator changes, for the next session.

`RecentFiles`: which recordings were opened or written lately, of which only paths and times are
kept, in a short file in the platform's state folder. If it cannot be read or written, a warning is
logged.

The config file keeps its order, its comments and its blank lines.
"""

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import platformdirs

from stepscope.recordings.importing.source import FOLDER_PREFIX

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


MAX_FILES = 20


class RecentFiles:
    """The list of recent recordings, the newest first; by default in the file of this user."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or platformdirs.user_state_path("stepscope") / "recent.json"

    def files(self) -> list[tuple[Path, float]]:
        """Return (path, last use in Unix time) of each file, even if it is gone by now."""
        try:
            entries = json.loads(self.path.read_text("utf-8"))
            found = [(Path(str(each["path"])), float(each["time"])) for each in entries]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the list of recent files is not readable: %s: %s", self.path, error)
            return []
        return found[:MAX_FILES]

    def remember(self, file: Path) -> None:
        file = Path(os.path.abspath(file))  # not resolved: links stay as the user knows them
        kept = [(path, used_s) for path, used_s in self.files() if path != file]
        entries = [(file, time.time()), *kept][:MAX_FILES]
        document = [{"path": str(path), "time": used_s} for path, used_s in entries]
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(document, indent=1), "utf-8")
            unfinished.replace(self.path)
        except OSError as error:
            log.warning("the list of recent files is not written: %s", error)
            with contextlib.suppress(OSError):
                unfinished.unlink()


def remember(file: Path) -> None:
    """Put a recording just opened or written at the front of the list, if not temporary."""
    if not file.parent.name.startswith(FOLDER_PREFIX):
        RecentFiles().remember(file)
