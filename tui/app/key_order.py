"""`KeyOrder`: handles keys in the order in which they were typed.

A key sent to the main screen comes back to the application before it takes effect. It may open an
overlay, so a later key must not reach that overlay first.
"""

from textual import events
from textual.app import App
from textual.screen import Screen

from stepscope.tui.screens.overlays.overlay import Overlay

_HELD_S = 0.2  # at most, for a key that never comes back


class KeyOrder:
    """Holds keys for an overlay back until all that were typed before them have come back.

    Args:
        main: the screen whose keys come back.
    """

    def __init__(self, app: App[None], main: Screen[None]) -> None:
        self.num_under_way = 0  # with the main screen
        self._app = app
        self.main = main
        self._held: list[events.Key] = []

    def admits(self, event: events.Key) -> bool:
        """Whether a key may go on now; if not, it is kept."""
        screen = self._app.screen
        if event.is_forwarded:
            self.num_under_way = max(0, self.num_under_way - 1)
        elif isinstance(screen, Overlay) and self.num_under_way:
            if not self._held:
                self._app.set_timer(_HELD_S, self._release)
            self._held.append(event)
            return False
        elif screen is self.main:
            self.num_under_way += 1
        return True

    def release_in_time(self) -> None:
        """Pass the kept keys on once no earlier key is under way."""
        if self._held and not self.num_under_way:
            self._release()

    def _release(self) -> None:
        self.num_under_way = 0
        held, self._held = self._held, []
        for event in held:
            self._app.post_message(event)
