"""A dashboard of an engine that runs in the same process, and key presses for it."""

import asyncio

from textual import events

from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.app.app import Dashboard


def dashboard(source: Subscriber) -> Dashboard:
    control = source.endpoint.control
    return Dashboard(source, source.history, control_endpoint=control, any_terminal=True)


async def press(app: Dashboard, *keys: str) -> None:
    """Like `Pilot.press`, which would wait for an idle process: here an engine runs in it."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))
        await asyncio.sleep(0.05)
