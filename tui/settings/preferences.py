"""`Preferences`: saves the settings that the operator changes, for the next session.

The config file keeps its order, its comments and its blank lines.
"""

import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

Value: TypeAlias = str | bool | float
News: TypeAlias = tuple[str, Literal["text", "caution"]]

log = logging.getLogger("stepscope.tui")

_QUIET_S = 1.0  # wait after the last change, so that four presses of a key cause one write


class ConfigFileError(Exception):
    """The config file cannot be changed; the message says why in one line."""


def changed(path: Path, section: str, values: Mapping[str, str | bool | float]) -> None:
    """Set keys of a section, all or, with ConfigFileError, none; a link and comments stay."""
    import tomlkit  # only a change needs it
    from tomlkit.exceptions import TOMLKitError

    try:
        real = path.resolve()
        text = real.read_text("utf-8") if real.exists() else ""
        document = tomlkit.parse(text)
        table = document.setdefault(section, tomlkit.table())
        if not isinstance(table, dict):
            raise ConfigFileError(f"{path}: {section} is not a section")
        for name, value in values.items():
            table[name] = value
        _replace(real, tomlkit.dumps(document))
    except OSError as error:
        raise ConfigFileError(f"{error.filename or path}: {error.strerror}") from error
    except (TOMLKitError, ValueError) as error:
        raise ConfigFileError(f"{path} is not TOML: {error}") from error


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(13, "it may not be written to", str(path))
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, mode)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


class Preferences:
    """Writes changed settings of `[dashboard]` into the config file, a moment after the change.

    `set` and `news` belong to the UI thread; another thread writes the file.

    Args:
        path: the config file; None: nothing is saved.
        began: the settings with which the dashboard was started. Only these can be saved.
        why_not: if `path` is None, the reason why nothing is saved, for the operator.
    """

    def __init__(
        self,
        path: Path | None = None,
        began: Mapping[str, Value | None] | None = None,
        why_not: str = "",
    ) -> None:
        self._path = path
        self._why_not = why_not
        self._current = dict(began or {})
        self._written = dict(self._current)  # the settings as the file has them
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # held during the disk write, so `_lock` need not be
        self._timer: threading.Timer | None = None
        self._news: News | None = None
        self._unkept: dict[str, str] = {}  # changes that are not saved, and not yet reported

    def has(self, name: str) -> bool:
        """Whether this setting is kept for the next session."""
        return name in self._current

    def set(self, name: str, value: Value) -> None:
        """Take a value that the operator has chosen, and save it a moment later."""
        with self._lock:
            if name not in self._current or self._current[name] == value:
                return
            self._current[name] = value
            if self._path is None:
                if self._why_not:
                    self._unkept[name] = f"{name} {_said(value)}"
                    what = ", ".join(self._unkept.values())
                    self._news = (f"{what}: for this session only: {self._why_not}", "text")
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(_QUIET_S, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def news(self) -> News | None:
        """Return a notice on whether the last change was saved, once, or None."""
        with self._lock:
            news, self._news = self._news, None
            self._unkept.clear()
        return news

    def flush(self) -> None:
        """Write the changed settings now; `news` returns how that went."""
        with self._writing:
            with self._lock:
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                changes = {
                    name: value
                    for name, value in self._current.items()
                    if value is not None and value != self._written.get(name)
                }
            if self._path is None or not changes:
                return
            news = self._write(self._path, changes)
            with self._lock:
                self._news = news

    def _write(self, path: Path, changes: Mapping[str, Value]) -> News:
        try:
            changed(path, "dashboard", changes)
        except ConfigFileError as error:
            log.warning("preferences are not kept: %s", error)
            return f"not kept: {error}", "caution"
        self._written |= changes
        what = ", ".join(f"{name} {_said(value)}" for name, value in changes.items())
        return f"saved for next time: {what} ({path})", "text"


def _said(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else value
