"""The command palette that an application has open."""

from typing import Any

from textual.app import App
from textual.command import CommandList

from tests.support.waiting import until


async def offered_in_palette(app: App[Any]) -> list[str]:
    """The lines of the actions that the palette offers."""
    await until(lambda: bool(app.screen.query(CommandList)), "the palette is not open")
    await app.workers.wait_for_complete()
    return [str(option.prompt) for option in app.screen.query_one(CommandList).options]
