"""Edits the config file, and keeps its order, comments and blank lines."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError


class ConfigFileError(Exception):
    """The config file cannot be changed; the message says why in one line."""


def changed(path: Path, section: str, values: Mapping[str, str | bool | float]) -> None:
    """Set keys of a section, all or, with ConfigFileError, none; a link and comments stay."""
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
