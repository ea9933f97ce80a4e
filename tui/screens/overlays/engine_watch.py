"""`EngineWatch`: tells an editor whether the engine it was opened for still answers.

An editor stays open when its engine goes away: if it closed, the operator's next letters would
reach the screen below, where every letter is a command.
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
    """The engine that would apply the input, and whether it answers."""

    engine_id: str | None
    answers: bool


class EngineWatch:
    """Holds input back if no engine answers, or if another engine does and nobody noticed.

    Args:
        now: returns the engine that would apply the input now.
    """

    def __init__(self, now: Callable[[], EngineNow]) -> None:
        self._look = now
        self._now = now()
        self._typed_for = self._noted = self._seen = self._now.engine_id

    def look(self) -> bool:
        """Look again; return True if a different engine answers than at the last look."""
        self._now = self._look()
        if not self._now.answers or self._now.engine_id == self._seen:
            return False
        self._seen = self._now.engine_id
        return True

    def admits(self) -> bool:
        """Whether Enter applies the input now; for another engine only the second Enter does."""
        if not self._now.answers:
            return False
        is_noted, self._noted = self._noted == self._seen, self._seen
        return is_noted

    def begin(self) -> None:
        """Treat the input from now on as meant for the engine that answers."""
        self._typed_for = self._noted = self._seen

    def trouble(self, room: int) -> str | None:
        """Return why Enter would not apply the input, in at most `room` cells; None if it would.

        If no text fits, the shortest is returned.
        """
        if not self._now.answers:
            return fmt.first_fitting(_GONE, room)
        if self._typed_for == self._seen:
            return None
        often = "again" if self._noted == self._seen else "twice"
        return fmt.first_fitting([form.format(often=often) for form in _ANOTHER], room)
