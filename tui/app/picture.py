"""Pictures of the dashboard, made without a terminal: SVG or plain text, by file suffix.

The `Dashboard` is the same as on a terminal.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from textual.app import App

from stepscope.recordings.compare.columns import Align
from stepscope.recordings.errors import NotInRecording
from stepscope.recordings.export.output import writing
from stepscope.recordings.history.source import Source
from stepscope.tui.app.app import Dashboard
from stepscope.tui.screens.handlers import svg
from stepscope.tui.screens.session_screen import DEFAULT_FPS
from stepscope.tui.settings.action_table import Page
from stepscope.tui.views.frame.compare_choices import Origin
from stepscope.tui.views.lines import Lines
from stepscope.tui.views.theme import ThemeName
from stepscope.tui.views.view import ZOOMS, Axis

_LOOK_S = 0.02


def screenshot(
    source: Source,
    path: Path,
    size: tuple[int, int] = (120, 40),
    *,
    theme: ThemeName = "dark",
    ascii: bool = False,
    page: Page = "live",
    axis: Axis = "step",
    zoom: int | None = None,
    request_id: int | None = None,
    compared: tuple[Origin, Origin, Align] | None = None,
) -> None:
    """Draw the dashboard without a terminal and write (or replace) the file `path`.

    If the engine publishes prompts and outputs, only the owner may read the file.

    Args:
        zoom: a column holds `zoom` steps, or `zoom` times 10 ms; one of `ZOOMS`. None: a step, or
            a time by which all of a recording fits.
        compared: two runs to read completely and compare, and how to align them.

    The other arguments are those of `Dashboard`. No event loop may run in this thread.

    Raises:
        NotInRecording: no such request at this step.
        RecordingError: `path` cannot be written.
    """
    app = Dashboard(
        source,
        fps=DEFAULT_FPS,
        ascii_only=ascii,
        theme=theme,
        any_terminal=True,
        axis=axis,
    )
    view = app.main.view
    view.page, view.selected = page, request_id
    if zoom is not None:
        view.zoom_idx, view.is_time_fitted = ZOOMS.index(zoom), True
    if compared is not None:
        app.compare(*compared)
    draw = svg if path.suffix.lower() == ".svg" else text
    content = asyncio.run(_picture(app, size, request_id, draw))
    info = source.history.info
    is_private = info is not None and info.with_tokens
    with writing(path, replace=True, is_private=is_private) as stream:
        stream.write(content.encode())


async def _picture(
    app: Dashboard,
    size: tuple[int, int],
    request_id: int | None,
    draw: Callable[[App[None]], str],
) -> str:
    try:
        async with app.run_test(size=size) as pilot:
            screen = app.main
            comparer = screen.session.compare.comparer
            while comparer is not None and comparer.is_reading:
                await asyncio.sleep(_LOOK_S)
            screen.draw()
            frame = screen.new_frame()
            if request_id is not None and request_id not in frame.state.requests:
                raise NotInRecording(
                    f"r{request_id} is not known any more, or not yet, at this step: choose --at"
                )
            await pilot.pause()
            return draw(app)
    finally:
        app.close()


def text(app: App[None]) -> str:
    """Return what an application shows now, overlays included, as lines of plain text."""
    rows = [" " * app.size.width] * app.size.height
    for shown in (lines for screen in app.screen_stack for lines in screen.query(Lines)):
        place = shown.region
        for y, line in enumerate(shown.plain_text(), place.y):
            rows[y] = rows[y][: place.x] + line + rows[y][place.right :]
    return "".join(row.rstrip() + "\n" for row in rows)
