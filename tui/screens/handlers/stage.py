"""What handlers need of their screen: `Stage`, and `Looks` for its appearance."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from textual.screen import Screen

from stepscope.recordings.history.history import History
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.theme import Skin

_T = TypeVar("_T")


class Stage(Protocol):
    """The picture that is shown, and what may open above it."""

    @property
    def skin(self) -> Skin: ...

    @property
    def frame(self) -> Frame | None:
        """What the picture was drawn from; None before the first one."""

    @property
    def history(self) -> History:
        """The history shown: the session's, or the one from before a restart."""

    @property
    def num_lanes(self) -> int:
        """All lanes, also those that do not fit the screen."""

    @property
    def following(self) -> bool:
        """Whether the picture moves by itself."""

    def new_frame(self) -> Frame:
        """What there is to see now."""

    def look_at(self, history: History) -> None:
        """Show another history of this source."""

    def draw(self) -> None:
        """A frame, now."""

    def draw_next(self) -> None:
        """Draw a frame now; while a replay seeks, wait for what it finds."""

    def text_of(self, *names: str) -> list[str]:
        """What some of the views show."""

    def action_do(self, action_id: str) -> None:
        """Carry out an action of the table and show what it did at once."""

    def open_overlay(
        self, overlay: Screen[_T], use: Callable[[_T | None], None] | None = None
    ) -> None:
        """Show an overlay; `use` gets what it is closed with."""


class Looks(Protocol):
    """How the dashboard looks, as keys change it."""

    @property
    def skin(self) -> Skin: ...

    @property
    def fps(self) -> float: ...

    def set_skin(self, skin: Skin) -> None: ...

    def set_fps(self, fps: float) -> None: ...

    def draw(self) -> None: ...
