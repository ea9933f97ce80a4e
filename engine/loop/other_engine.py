"""`OtherEngine`: another engine that goes on with requests of this one."""

from collections.abc import Sequence
from typing import Protocol

from stepscope.engine.scheduling.step import ScheduledRow


class OtherEngine(Protocol):
    """As the loop sees it; `handover.HandOver` is the real one. On the engine's thread."""

    @property
    def num_away(self) -> int:
        """Unfinished requests that are there. From any thread."""
        ...

    def is_away(self, request_id: int) -> bool:
        """Whether the other engine has it. From any thread."""
        ...

    def after_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Hand over the requests that got a token and have not ended."""
        ...

    def abort(self, request_id: int) -> bool:
        """End a request that is there; False if it is not."""
        ...

    def close(self) -> None:
        """End all that is there."""
        ...
