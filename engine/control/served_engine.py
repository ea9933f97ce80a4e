"""`ServedEngine`: what the control socket needs from an engine."""

from typing import Protocol

from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.inbox import Inbox
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots


class ServedEngine(Protocol):
    """An engine, as the control socket uses it. Any thread may use all members."""

    @property
    def inbox(self) -> Inbox: ...
    @property
    def control_tally(self) -> ControlTally: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def next_step(self) -> int:
        """Number of the step that is scheduled next."""
        ...

    @property
    def last_step(self) -> int:
        """Number of the last published step, -1 before the first."""
        ...

    @property
    def kept_snapshots(self) -> KeptSnapshots: ...
    @property
    def max_waiting(self) -> int:
        """With this many commands in the inbox, a further `Submit` is refused."""
        ...

    def clock(self) -> int:
        """Return the current time on the engine's clock, in nanoseconds."""
        ...
