"""`Stage` and `Looks`: the parts of a screen that handlers may use.

They are protocols; the main screen implements them.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from textual.screen import Screen

from stepscope.recordings.history.history import History
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.theme import Skin

_T = TypeVar("_T")


class Stage(Protocol):
    """The picture on the screen, and the overlays (dialogs) above it."""

    @property
    def skin(self) -> Skin: ...

    @property
    def frame(self) -> Frame | None:
        """The data that the present picture was drawn from; None before the first picture."""

    @property
    def history(self) -> History:
        """The steps that the screen shows: those of the session, or those from before a restart."""

    @property
    def num_lanes(self) -> int:
        """Number of requests that could have a lane, including those without room on the screen."""

    @property
    def following(self) -> bool:
        """Whether the picture moves by itself, as it shows the newest step."""

    def new_frame(self) -> Frame:
        """Return a new frame: the data of the picture as of now."""

    def look_at(self, history: History) -> None:
        """Show another history of this source, such as the one from before a restart."""

    def draw(self) -> None:
        """Draw a frame now."""

    def draw_next(self) -> None:
        """Draw a frame now; if a replay is seeking a step, draw once that step is found."""

    def text_of(self, *names: str) -> list[str]:
        """Return the text that these views show, line by line."""

    def action_do(self, action_id: str) -> None:
        """Run the handler of an action, and draw the result at once."""

    def open_overlay(
        self, overlay: Screen[_T], use: Callable[[_T | None], None] | None = None
    ) -> None:
        """Show an overlay above the screen. When it closes, `use` is called with its result."""


class Looks(Protocol):
    """How the screen looks, and the methods by which keys change that."""

    @property
    def skin(self) -> Skin: ...

    @property
    def fps(self) -> float: ...

    def set_skin(self, skin: Skin) -> None: ...

    def set_fps(self, fps: float) -> None: ...

    def draw(self) -> None: ...
