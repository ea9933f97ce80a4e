"""`Hooks`: wraps methods of one object of the engine, and restores them."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Hooks:
    """Wraps methods of one object. The object's class and other instances stay unchanged."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._ours: dict[str, tuple[object, object]] = {}  # (our wrapper, the value before it)

    def wrap(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the method called `name` by what `wrap` returns for it."""
        before = vars(self._target).get(name, _ABSENT)
        ours = wrap(getattr(self._target, name))
        setattr(self._target, name, ours)
        self._ours[name] = (ours, before)

    def restore(self) -> None:
        """Restore the original methods, except those that other code has wrapped since."""
        for name, (ours, before) in self._ours.items():
            if vars(self._target).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(self._target, name)
            else:
                setattr(self._target, name, before)
        self._ours.clear()
