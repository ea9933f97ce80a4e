"""`Hooks`: wraps methods of single objects of the engine, and restores them."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Hooks:
    """Wraps methods of objects. Their classes and other instances stay unchanged."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str, object, object]] = []  # our wrapper, what was before it

    def wrap(
        self, target: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace the method called `name`, if there is one, by what `wrap` returns for it."""
        if hasattr(target, name):
            before, ours = vars(target).get(name, _ABSENT), wrap(getattr(target, name))
            setattr(target, name, ours)
            self._wrapped.append((target, name, ours, before))

    def restore(self) -> None:
        """Restore the original methods, except those that other code has wrapped since."""
        for target, name, ours, before in self._wrapped:
            if vars(target).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, before)
        self._wrapped.clear()
