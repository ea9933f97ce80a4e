"""`OtherEngine`: the decode engine that continues requests of this prefill engine."""

from collections.abc import Sequence
from typing import Protocol

from stepscope.engine.scheduling.step import ScheduledRow


class OtherEngine(Protocol):
    """The link to it, as the loop uses it: `handover.HandOver`. On the engine's thread."""

    @property
    def num_away(self) -> int:
        """Unfinished requests in the other engine. From any thread."""
        ...

    def is_away(self, request_id: int) -> bool:
        """Whether the other engine has the request. From any thread."""
        ...

    def after_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Hand over the requests that got a token in the step and have not ended."""
        ...

    def abort(self, request_id: int) -> bool:
        """End a request in the other engine. False if it is not there."""
        ...

    def close(self) -> None:
        """End all requests in the other engine."""
        ...
