"""The parts of a screen that handlers need: `Stage`, and `Looks` for its appearance."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from textual.screen import Screen

from stepscope.recordings.history.history import History
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.theme import Skin

_T = TypeVar("_T")


class Stage(Protocol):
    """The picture on the screen, and the overlays above it."""

    @property
    def skin(self) -> Skin: ...

    @property
    def frame(self) -> Frame | None:
        """The frame that the picture was drawn from; None before the first picture."""

    @property
    def history(self) -> History:
        """The history on the screen: the session's, or the one from before a restart."""

    @property
    def num_lanes(self) -> int:
        """Number of lanes, including those that do not fit the screen."""

    @property
    def following(self) -> bool:
        """Whether the picture moves by itself."""

    def new_frame(self) -> Frame:
        """Return a new frame of the current state."""

    def look_at(self, history: History) -> None:
        """Show another history of this source."""

    def draw(self) -> None:
        """Draw a frame now."""

    def draw_next(self) -> None:
        """Draw a frame now; while a replay seeks, wait until it has found the step."""

    def text_of(self, *names: str) -> list[str]:
        """Return the text that these views show, line by line."""

    def action_do(self, action_id: str) -> None:
        """Carry out an action of the table and show what it did at once."""

    def open_overlay(
        self, overlay: Screen[_T], use: Callable[[_T | None], None] | None = None
    ) -> None:
        """Show an overlay; when it closes, `use` gets its result."""


class Looks(Protocol):
    """How the dashboard looks, as keys change it."""

    @property
    def skin(self) -> Skin: ...

    @property
    def fps(self) -> float: ...

    def set_skin(self, skin: Skin) -> None: ...

    def set_fps(self, fps: float) -> None: ...

    def draw(self) -> None: ...
