"""`EngineWatch`: whether the engine an editor was opened for still answers.

An editor stays open when its engine goes: if it closed, the operator's next letters would reach the
screen below, where every letter is a command.
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
    """The engine that would apply the input; `answers`: whether it answers."""

    engine_id: str | None
    answers: bool


class EngineWatch:
    """Keeps input from reaching no engine, or unnoticed another engine.

    Args:
        now: gives the engine that answers.
    """

    def __init__(self, now: Callable[[], EngineNow]) -> None:
        self._look = now
        self._now = now()
        self._typed_for = self._noted = self._seen = self._now.engine_id

    def look(self) -> bool:
        """Look again; True if another engine than before answers now."""
        self._now = self._look()
        if not self._now.answers or self._now.engine_id == self._seen:
            return False
        self._seen = self._now.engine_id
        return True

    def admits(self) -> bool:
        """Enter was pressed: whether to apply now; another engine needs a second Enter."""
        if not self._now.answers:
            return False
        is_noted, self._noted = self._noted == self._seen, self._seen
        return is_noted

    def begin(self) -> None:
        """From now on the input is for the engine that answers."""
        self._typed_for = self._noted = self._seen

    def trouble(self, room: int) -> str | None:
        """Why the input is not applied, in a text that fits; None if it would be."""
        if not self._now.answers:
            return fmt.first_fitting(_GONE, room)
        if self._typed_for == self._seen:
            return None
        often = "again" if self._noted == self._seen else "twice"
        return fmt.first_fitting([form.format(often=often) for form in _ANOTHER], room)
