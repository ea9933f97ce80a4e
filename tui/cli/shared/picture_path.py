"""Parses options about a picture: its file, whose suffix is the format, and its size."""

import re
from pathlib import Path

from stepscope.tui.cli.shared.output_path import output_path
from stepscope.tui.settings.cli_errors import WrongUsage

_MAX_COLUMNS, _MAX_ROWS = 1000, 500
PICTURE_SUFFIXES = (".svg", ".txt")


def picture_path(output: str, suffixes: tuple[str, ...] = PICTURE_SUFFIXES) -> Path:
    """Return the path to write to, after a check that it can be written.

    Raises:
        WrongUsage: the file does not have one of the suffixes.
        CommandFailed: the path is a folder, or its folder does not exist.
    """
    path = output_path(output)
    check_suffix("--output", path, suffixes)
    return path


def check_suffix(option: str, path: Path, suffixes: tuple[str, ...] = PICTURE_SUFFIXES) -> None:
    """Raise WrongUsage unless the file has one of the suffixes."""
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        instead = "; a screen is no PNG any more: take SVG" if suffix == ".png" else ""
        raise WrongUsage(f"{option}: expected a name that ends in {known}, got {path}{instead}")


def picture_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})\s*[xX×]\s*(\d{1,5})", text.strip())
    if match is None:
        raise WrongUsage(f"--size: expected columns and rows such as 120x40, got {text!r}")
    from stepscope.tui.views.layout import MIN_HEIGHT, MIN_WIDTH  # loads Textual

    num_columns, num_rows = int(match[1]), int(match[2])
    if not (MIN_WIDTH <= num_columns <= _MAX_COLUMNS and MIN_HEIGHT <= num_rows <= _MAX_ROWS):
        bounds = f"{MIN_WIDTH}x{MIN_HEIGHT} to {_MAX_COLUMNS}x{_MAX_ROWS}"
        raise WrongUsage(f"--size: expected {bounds}, got {text!r}")
    return num_columns, num_rows
