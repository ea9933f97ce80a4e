"""Everything about one step, for screens without the rail."""

from collections.abc import Callable

from textual.geometry import Region

from stepscope.tui.frame import Frame
from stepscope.tui.screens.overlay import Overlay
from stepscope.tui.theme import Skin
from stepscope.tui.widgets import inspector
from stepscope.tui.widgets.lines import Line


class StepDetails(Overlay[None]):
    """The inspector as a box of its own; left and right go on to other steps.

    Args:
        frame: the picture on the screen below.
        move: goes so many columns and gives the new picture.
    """

    def __init__(self, skin: Skin, frame: Frame, move: Callable[[int], Frame]) -> None:
        super().__init__(skin)
        self._frame = frame
        self._move = move

    def place(self, width: int, height: int) -> Region:
        num_rows = len(inspector.body(self._frame, max(1, height - 4)))
        box_width, box_height = min(width, 72), min(height, num_rows + 2)
        return Region((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)

    def lines(self, width: int, height: int) -> list[Line]:
        return inspector.draw(self._frame, width, height, 0)

    def pressed(self, key: str, character: str | None) -> None:
        steps = {"left": -1, "h": -1, "right": 1, "l": 1, "shift+left": -10, "shift+right": 10}
        if key in steps:
            self._frame = self._move(steps[key])
        else:
            self.dismiss(None)
