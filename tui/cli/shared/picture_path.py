"""Pictures as options name them: the file, whose suffix says the format, and the size."""

import re
from pathlib import Path

from stepscope.tui.cli.shared.output_path import output_path
from stepscope.tui.settings.cli_errors import WrongUsage

_MAX_COLUMNS, _MAX_ROWS = 1000, 500
PICTURE_SUFFIXES = (".svg", ".png", ".txt")


def picture_path(output: str, suffixes: tuple[str, ...]) -> Path:
    """Where to write, once it is known that it could be.

    Raises:
        WrongUsage: another suffix than these.
        CommandFailed: it is a folder, or in one that is not there.
    """
    path = output_path(output)
    if path.suffix.lower() not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise WrongUsage(f"--output: expected a name that ends in {known}, got {output!r}")
    return path


def picture_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})\s*[xX×]\s*(\d{1,5})", text.strip())
    if match is None:
        raise WrongUsage(f"--size: expected columns and rows such as 120x40, got {text!r}")
    from stepscope.tui.views.layout import MIN_HEIGHT, MIN_WIDTH  # with Textual, once it is needed

    num_columns, num_rows = int(match[1]), int(match[2])
    if not (MIN_WIDTH <= num_columns <= _MAX_COLUMNS and MIN_HEIGHT <= num_rows <= _MAX_ROWS):
        bounds = f"{MIN_WIDTH}x{MIN_HEIGHT} to {_MAX_COLUMNS}x{_MAX_ROWS}"
        raise WrongUsage(f"--size: expected {bounds}, got {text!r}")
    return num_columns, num_rows
