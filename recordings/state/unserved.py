"""`Unserved`: the requests of a session that never got a token, and how long they waited."""

from collections.abc import Iterable
from typing import NamedTuple

from stepscope.engine.protocol.wire import (
    Aborted,
    Arrived,
    EngineInfo,
    EngineStatus,
    Finished,
    RequestEvent,
    RowFlag,
    Snapshot,
    StepRecord,
    Telemetry,
)

_LAST_CHUNK = int(RowFlag.LAST_CHUNK)


class NeverServed(NamedTuple):
    """Requests without any token: how many, and their longest wait.

    They were aborted, or still waited at the last message.
    """

    num_requests: int
    longest_ms: float | None  # the longest wait; None if there are no such requests


class Unserved:
    """Finds the requests that never got a token. Feed it the messages of a session in order.

    Args:
        only: follow this request alone; None: all requests.
    """

    def __init__(self, only: int | None = None) -> None:
        self._only = only
        self._engine_id: str | None = None
        self._waiting: dict[int, int] = {}  # request -> arrival, engine time
        self._given_up_ns: list[int] = []  # the waits of requests that ended
        self._latest_ns = 0  # engine time of the latest message
        self._needs_snapshot = True

    def take(self, message: Telemetry, lost: bool = False) -> None:
        """Process the next message.

        Args:
            lost: whether messages before it are missing.
        """
        self._needs_snapshot |= lost
        if isinstance(message, StepRecord):
            self._latest_ns = message.tokens_ns
            self._take_events(message.events)
            if self._waiting:
                for row in message.batch or ():
                    if row.flags & _LAST_CHUNK:
                        self._waiting.pop(row.request_id, None)
        elif isinstance(message, EngineStatus):
            self._latest_ns = max(self._latest_ns, message.time_ns)
            self._take_events(message.events)
        elif isinstance(message, Snapshot):
            self._meet(message.info)
            if self._needs_snapshot:
                self._needs_snapshot = False
                self._waiting = {
                    view.request_id: view.arrival_ns
                    for view in message.requests
                    if not (view.num_output_tokens or view.is_partial or view.status == "finished")
                    and self._only in (None, view.request_id)
                }
            self._latest_ns = max(self._latest_ns, message.time_ns)
        elif isinstance(message, EngineInfo):
            self._meet(message)

    def found(self) -> NeverServed:
        """Return the result. Call it after the last message."""
        waits = [*self._given_up_ns, *(self._latest_ns - each for each in self._waiting.values())]
        return NeverServed(len(waits), max(waits) / 1e6 if waits else None)

    def _take_events(self, events: Iterable[RequestEvent]) -> None:
        for event in events:
            request_id = event.request_id
            if isinstance(event, Arrived):
                if self._only in (None, request_id) and event.origin is None:
                    self._waiting[request_id] = event.time_ns
            elif isinstance(event, Aborted) and request_id in self._waiting:
                self._given_up_ns.append(self._latest_ns - self._waiting.pop(request_id))
            elif isinstance(event, Finished):
                self._waiting.pop(request_id, None)

    def _meet(self, info: EngineInfo) -> None:
        if self._engine_id not in (None, info.engine_id):
            self._given_up_ns += [self._latest_ns - each for each in self._waiting.values()]
            self._waiting = {}
            self._latest_ns = 0
            self._needs_snapshot = True
        self._engine_id = info.engine_id
