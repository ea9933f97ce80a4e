"""A dashboard of an engine that runs in the same process, and key presses for it."""

from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.app.app import Dashboard
from tests.support.screens.keys import press_keys


def dashboard(source: Subscriber) -> Dashboard:
    control = source.endpoint.control
    return Dashboard(source, control_endpoint=control, any_terminal=True)


async def press(app: Dashboard, *keys: str) -> None:
    await press_keys(app, keys)
