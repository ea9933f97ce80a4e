"""Screenshots: what is on the screen, written to a new file as an SVG document."""

from itertools import count
from pathlib import Path
from typing import Any

from textual.app import App

from stepscope.recordings.file import access
from stepscope.recordings.file.mcap.format import default_name


def svg(app: App[Any]) -> str:
    """Return what an application shows now, as an SVG document with selectable text."""
    document = app.export_screenshot(title=app.title, simplify=True)
    # Without this attribute, many programs other than browsers draw a run of blanks as one blank.
    return document.replace("<text ", '<text xml:space="preserve" ')


def new_picture(document: str, shown: str) -> Path:
    """Write an SVG document to a new private file, named after what is shown; return its path."""
    folder = Path.cwd()
    first = folder / default_name(shown, ".svg")
    for number in count(1):
        path = first if number == 1 else first.with_stem(f"{first.stem}-{number}")
        try:
            # closed below
            stream = open(path, "x", encoding="utf-8", opener=access.private)  # noqa: SIM115
        except FileExistsError:  # two pictures in one second get two names
            continue
        try:
            with stream:
                stream.write(document)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path
    raise AssertionError("numbers end")
