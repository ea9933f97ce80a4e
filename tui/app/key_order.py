"""`KeyOrder`: handles keys in the order in which they were typed.

The main screen hands a key back to the application before the key takes effect. The key may open an
overlay, so a later key must not reach that overlay first.
"""

from textual import events
from textual.app import App
from textual.screen import Screen

from stepscope.tui.screens.overlays.overlay import Overlay

_HELD_S = 0.2  # longest wait for an earlier key, which may never come back


class KeyOrder:
    """Holds back keys for an overlay until the main screen has returned all earlier keys.

    Args:
        main: the main screen; the application sets it anew when it shows another one.
    """

    def __init__(self, app: App[None], main: Screen[None]) -> None:
        self.num_under_way = 0  # keys that the main screen has not yet returned
        self._app = app
        self.main = main
        self._held: list[events.Key] = []

    def admits(self, event: events.Key) -> bool:
        """Whether a key may be handled now; if not, it is kept for later."""
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
        """Pass the kept keys on if no earlier key is under way any more."""
        if self._held and not self.num_under_way:
            self._release()

    def _release(self) -> None:
        self.num_under_way = 0
        held, self._held = self._held, []
        for event in held:
            self._app.post_message(event)
