"""Checks the file that a command is to write, before the work for it begins."""

import os
from pathlib import Path

from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage


def output_path(text: str, *, is_new: bool = False) -> Path:
    """Return the path to write to, after a check that it can be written.

    Args:
        is_new: whether to refuse a file that exists.

    Raises:
        WrongUsage: the text does not name a file.
        CommandFailed: the path is a folder, its folder does not exist, or (`is_new`) the file
            exists.
    """
    if text.strip() in ("", "-"):  # '-' is refused: it would be a file, not standard output
        raise WrongUsage(f"--output: expected the name of a file, got {text!r}")
    path = Path(text)
    if text.endswith(os.sep) or path.is_dir():
        raise CommandFailed(f"{text} is a folder; name the file to write in it")
    if not path.parent.is_dir():
        raise CommandFailed(f"{text} cannot be written: {path.parent} is not a folder")
    if is_new and path.exists():
        raise CommandFailed(f"{text} is there already; remove it or choose another name")
    return path
