"""The file that a command is to write, looked at before any work is done for it."""

import os
from pathlib import Path

from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage


def output_path(text: str, option: str = "--output", *, is_new: bool = False) -> Path:
    """Where to write.

    Args:
        is_new: a file that is there is not to be replaced.

    Raises:
        WrongUsage: it names no file.
        CommandFailed: it is a folder, in one that is not there, or there already.
    """
    if text.strip() in ("", "-"):  # '-' would be a file of that name, and not a pipe
        raise WrongUsage(f"{option}: expected the name of a file, got {text!r}")
    path = Path(text)
    if text.endswith(os.sep) or path.is_dir():
        raise CommandFailed(f"{text} is a folder; name the file to write in it")
    if not path.parent.is_dir():
        raise CommandFailed(f"{text} cannot be written: {path.parent} is not a folder")
    if is_new and path.exists():
        raise CommandFailed(f"{text} is there already; remove it or choose another name")
    return path
