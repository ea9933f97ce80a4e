"""`KeyOrder`: handles keys and pastes in the order in which they were typed.

Textual passes a key first to the main screen, which then passes it on to the application; only
there it takes effect. If it opens an overlay, keys typed after it must not reach the overlay while
an earlier key is still on its way.
"""

from textual import events
from textual.app import App
from textual.screen import Screen

from stepscope.tui.screens.overlays.overlay import Overlay

_HELD_S = 0.2  # longest wait for an earlier key, which may never come back


class KeyOrder:
    """Holds back keys for an overlay until the main screen has passed on all earlier keys.

    Args:
        main: the main screen; the application sets it anew when it shows another one.
    """

    def __init__(self, app: App[None], main: Screen[None]) -> None:
        self.num_under_way = 0  # keys that the main screen has not yet returned
        self._app = app
        self.main = main
        self._held: list[events.Key | events.Paste] = []

    def admits(self, event: events.Key | events.Paste) -> bool:
        """Whether a key may be handled now. If not, the key is kept and handled later."""
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
        """If no earlier key is still on its way, pass the kept keys to the overlay."""
        if self._held and not self.num_under_way:
            self._release()

    def _release(self) -> None:
        self.num_under_way = 0
        held, self._held = self._held, []
        for event in held:
            self._app.post_message(event)
