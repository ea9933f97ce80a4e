"""A dashboard that runs in the test's own task."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot

from stepscope.tui.app.app import Dashboard


@asynccontextmanager
async def running(
    app: Dashboard, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Dashboard, Pilot[Any]]]:
    """Run it in the `with` block, and close it then."""
    async with app.run_test(size=size) as pilot:
        yield app, pilot
    app.close()
