"""`Later`: a sequence that is made at its first use, not when its module is imported."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

Item = TypeVar("Item")


class Later(Sequence[Item]):
    """A sequence that `make` returns, once something looks into it.

    Every worker of a test run imports every module. So only the worker that needs a session
    simulates it.
    """

    def __init__(self, make: Callable[[], Sequence[Item]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Sequence[Item]:
        return self._make()

    def __getitem__(self, place: Any) -> Any:
        return self._made[place]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)
