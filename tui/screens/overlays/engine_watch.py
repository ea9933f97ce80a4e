"""`EngineWatch`: tells an editor whether the engine it was opened for still answers.

An editor stays open when its engine goes away. If it closed, the letters that the operator goes on
typing would reach the screen below, where every letter is a command.
"""

from collections.abc import Callable
from typing import NamedTuple

from stepscope.tui.views import format as fmt

_GONE = (
    "no engine answers: your input stays and is not applied until one does",
    "no engine answers: not applied",
    "no engine answers",
)
_ANOTHER = (
    "another engine answers now: Enter {often} applies it there",
    "another engine: Enter {often}",
)


class EngineNow(NamedTuple):
    """The id of the engine that would get the input now, and whether that engine answers."""

    engine_id: str | None
    answers: bool


class EngineWatch:
    """Decides whether what was typed for one engine may go to the one that answers `now`."""

    def __init__(self, now: Callable[[], EngineNow]) -> None:
        self._look = now
        self._now = now()
        self._typed_for = self._noted = self._seen = self._now.engine_id

    def look(self) -> bool:
        """Update what is known of the engine; return true if another engine has begun to answer."""
        self._now = self._look()
        if not self._now.answers or self._now.engine_id == self._seen:
            return False
        self._seen = self._now.engine_id
        return True

    def admits(self) -> bool:
        """Whether Enter applies the input now; at another engine only the second does."""
        if not self._now.answers:
            return False
        is_noted, self._noted = self._noted == self._seen, self._seen
        return is_noted

    def begin(self) -> None:
        """Note that the operator begins to type for the engine that answers now."""
        self._typed_for = self._noted = self._seen

    def trouble(self, room: int) -> str | None:
        """Return why Enter would not apply the input, in about `room` cells, or None."""
        if not self._now.answers:
            return fmt.first_fitting(_GONE, room)
        if self._typed_for == self._seen:
            return None
        often = "again" if self._noted == self._seen else "twice"
        return fmt.first_fitting([form.format(often=often) for form in _ANOTHER], room)
