"""`OtherEngine`: the decode engine that continues requests of this prefill engine."""

from collections.abc import Sequence
from typing import Protocol

from stepscope.engine.scheduling.step import ScheduledRow


class OtherEngine(Protocol):
    """The link to the decode engine, as the loop uses it; implemented by `handover.HandOver`."""

    @property
    def num_away(self) -> int:
        """Number of unfinished requests at the decode engine. From any thread."""
        ...

    def is_away(self, request_id: int) -> bool:
        """Whether the request is at the decode engine. From any thread."""
        ...

    def after_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Hand over the requests that got a token in the step and have not ended."""
        ...

    def abort(self, request_id: int) -> bool:
        """End a request at the decode engine. Returns False if the request is not there."""
        ...

    def close(self) -> None:
        """End all requests that are at the decode engine."""
        ...
