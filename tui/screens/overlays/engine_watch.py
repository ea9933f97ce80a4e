"""`EngineWatch`: whether the engine that something is typed for is still there to take it.

An editor stays open when its engine goes: closed under the fingers of whoever types, it would
leave the rest of what is typed to the screen below, where every letter is a command.
"""

from collections.abc import Callable
from typing import NamedTuple

from stepscope.tui.views import format as fmt

_GONE = (
    "no engine answers: nothing is applied until one does; what is typed stays",
    "no engine answers: not applied",
    "no engine answers",
)
_ANOTHER = (
    "another engine answers by now: Enter {often} applies it there",
    "another engine: Enter {often}",
)


class EngineNow(NamedTuple):
    """Who would take what is applied; `answers`: whether anybody does."""

    engine_id: str | None
    answers: bool


class EngineWatch:
    """Nothing is applied to no engine, nor unnoticed to another one than it was typed for.

    Args:
        now: who is there.
    """

    def __init__(self, now: Callable[[], EngineNow]) -> None:
        self._look = now
        self._now = now()
        self._typed_for = self._noted = self._seen = self._now.engine_id

    def look(self) -> bool:
        """Look again; whether another engine than before has begun to answer."""
        self._now = self._look()
        if not self._now.answers or self._now.engine_id == self._seen:
            return False
        self._seen = self._now.engine_id
        return True

    def admits(self) -> bool:
        """Enter: whether it is applied now; another engine has to be taken note of first."""
        if not self._now.answers:
            return False
        is_noted, self._noted = self._noted == self._seen, self._seen
        return is_noted

    def begin(self) -> None:
        """What is typed from now on is for the engine that answers."""
        self._typed_for = self._noted = self._seen

    def trouble(self, room: int) -> str | None:
        """What is in the way, as fully as there is room for; None where nothing is."""
        if not self._now.answers:
            return fmt.first_fitting(_GONE, room)
        if self._typed_for == self._seen:
            return None
        often = "again" if self._noted == self._seen else "twice"
        return fmt.first_fitting([form.format(often=often) for form in _ANOTHER], room)
