"""`HandledScreen`: what handlers may use of a screen; the main screen is one."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from textual.app import App
from textual.screen import Screen

from stepscope.recordings.history.history import History
from stepscope.tui.screens.drawing.canvas import Canvas
from stepscope.tui.session.control.operator import Operator
from stepscope.tui.session.session import Session
from stepscope.tui.session.time.navigator import Navigator
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.notices import Notices
from stepscope.tui.views.theme import Skin
from stepscope.tui.views.view import View

_T = TypeVar("_T")


class HandledScreen(Protocol):
    """A session, what is shown of it, and the overlays (dialogs) above that."""

    session: Session
    view: View
    navigator: Navigator
    operator: Operator
    notices: Notices
    canvas: Canvas
    fps: float
    skin: Skin

    @property
    def app(self) -> App[object]: ...

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

    def forget(self) -> None:
        """Drop all cached figures, because the keys, service levels or history have changed."""

    def set_skin(self, skin: Skin) -> None: ...

    def set_fps(self, fps: float) -> None: ...

    def text_of(self, *names: str) -> list[str]:
        """Return the text that these views show, line by line."""

    def action_do(self, action_id: str) -> None:
        """Run the handler of an action, and draw the result at once."""

    def open_overlay(self, overlay: Screen[_T], use: Callable[[_T], None]) -> None:
        """Show an overlay above the screen. If it closes with a result, `use` gets that."""
