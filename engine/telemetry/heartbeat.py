"""`Heartbeat`: publishes the engine's info and status regularly, whether or not steps run."""

import time
from typing import Protocol

import msgspec

from stepscope.engine.protocol.wire import EngineInfo, EngineState

STATUS_INTERVAL_NS = 1_000_000_000
INFO_INTERVAL_NS = 5_000_000_000


class StatusSource(Protocol):
    """The methods of an engine that a heartbeat calls."""

    @property
    def state(self) -> EngineState: ...
    @property
    def has_step_in_flight(self) -> bool: ...
    @property
    def has_unpublished(self) -> bool:
        """Whether something happened that no message has reported yet."""

    def clock(self) -> int: ...
    def publish_info(self) -> None: ...
    def publish_status(self, state: EngineState, now_ns: int) -> None: ...
    def keep_snapshot(self, now_ns: int) -> None:
        """Take a snapshot and keep it for subscribers that join later, if one is due."""


class Heartbeat:
    """Publishes `EngineInfo` and `EngineStatus` when they are due. Belongs to the engine's thread.

    Attributes:
        next_status_ns: when the next status is due at the latest.
        is_overdue: whether a status was due while a step was in flight.
    """

    def __init__(self, engine: StatusSource) -> None:
        self.next_status_ns = 0
        self.is_overdue = False
        self._engine = engine
        self._next_info_ns = 0
        self._published_state: EngineState | None = None

    def publish(self, *, idle: bool) -> None:
        """Publish `EngineInfo` and a status, if they are due.

        A status shows queues and blocks as they are after the last published step, so it waits
        until no step is in flight. If the engine is `idle`, no step record will report what
        happened since the last message: then a status that does is due at once.
        """
        engine = self._engine
        now_ns = engine.clock()
        if now_ns >= self._next_info_ns:
            self._next_info_ns = now_ns + INFO_INTERVAL_NS
            engine.publish_info()
        state = engine.state
        is_due = (
            state != self._published_state
            or now_ns >= self.next_status_ns
            or (idle and engine.has_unpublished)
        )
        self.is_overdue = is_due and engine.has_step_in_flight
        if is_due and not self.is_overdue:
            self.publish_status(state)
            engine.keep_snapshot(now_ns)

    def publish_status(self, state: EngineState) -> None:
        """Publish a status now. There must be no step in flight."""
        now_ns = self._engine.clock()
        self._published_state = state
        self.next_status_ns = now_ns + STATUS_INTERVAL_NS
        self._engine.publish_status(state, now_ns)


_CLOCKS_MOVED_NS = 50_000_000


def anchored(info: EngineInfo) -> EngineInfo:
    """Return `info` with current values of both clocks, if their difference has changed."""
    monotonic_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    moved_ns = (wall_ns - monotonic_ns) - (info.wall_ns - info.monotonic_ns)
    if abs(moved_ns) < _CLOCKS_MOVED_NS:
        return info
    return msgspec.structs.replace(info, monotonic_ns=monotonic_ns, wall_ns=wall_ns)
