"""Clicks on a view of the main screen, wherever the layout has put it."""

from typing import Any

from textual.pilot import Pilot


async def click(pilot: Pilot[Any], view: str, offset: tuple[int, int], times: int = 1) -> None:
    """Click on a cell of a view, counted from the view's first cell."""
    place = pilot.app.main.canvas.places[view]
    await pilot.click(offset=(place.x + offset[0], place.y + offset[1]), times=times)
