"""`Hooks`: our functions around methods of one scheduler object, and the way back."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Hooks:
    """Wraps methods on the instance: its class, and all other schedulers, stay as they are."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._ours: dict[str, tuple[object, object]] = {}  # what is there, what was there before

    def wrap(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method by `wrap(method)`."""
        before = vars(self._target).get(name, _ABSENT)
        ours = wrap(getattr(self._target, name))
        setattr(self._target, name, ours)
        self._ours[name] = (ours, before)

    def restore(self) -> None:
        """Put the original methods back. A method that other code wrapped meanwhile stays."""
        for name, (ours, before) in self._ours.items():
            if vars(self._target).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(self._target, name)
            else:
                setattr(self._target, name, before)
        self._ours.clear()
