"""Keys for a dashboard under test: each comes when all before it has been handled.

Textual's own `Pilot` looks whether the process is idle, which depends on the machine and on what
else runs in the process.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from textual import events
from textual.app import App
from textual.keys import _character_to_key, key_to_character
from textual.pilot import Pilot

HOPS = 4  # a key goes from the application to the focused widget, and to those around it
_pause = Pilot.pause


async def settle(app: App[Any]) -> None:
    """Wait until all posted messages were handled, and those that they led to."""
    for _ in range(HOPS):
        await _pause(Pilot(app), 0)
        while app._resize_timer is not None:  # a moment in which further sizes may come
            await asyncio.sleep(0.001)


async def press_keys(app: App[Any], keys: Iterable[str]) -> None:
    """In place of `App._press_keys`."""
    for key in keys:
        name = _character_to_key(key) if len(key) == 1 and not key.isalnum() else key
        app.post_message(events.Key(name, key if len(key) == 1 else key_to_character(name)))
        await settle(app)
        await app.animator.wait_until_complete()


async def pause(pilot: Pilot[Any], delay: float | None = None) -> None:
    """In place of `Pilot.pause`."""
    await (settle(pilot.app) if delay is None else _pause(pilot, delay))
