"""`ServedEngine`: what the control socket needs of an engine."""

from typing import Protocol

from stepscope.engine.loop.control_tally import ControlTally
from stepscope.engine.loop.inbox import Inbox, Settled
from stepscope.engine.protocol.asker import Asker
from stepscope.engine.protocol.commands import Change
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots


class ServedEngine(Protocol):
    """All of it may be used from any thread."""

    @property
    def inbox(self) -> Inbox: ...
    @property
    def control_tally(self) -> ControlTally: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def next_step(self) -> int:
        """The step that is scheduled next."""
        ...

    @property
    def last_step(self) -> int:
        """The newest step that was published; -1 before the first."""
        ...

    @property
    def kept_snapshots(self) -> KeptSnapshots: ...
    @property
    def max_waiting(self) -> int:
        """Commands that may wait in the inbox before a `Submit` is refused."""
        ...

    def settled(self, command: Change, asker: Asker, is_alone: bool) -> Settled | None:
        """The answer to a change without effect; None: the engine's thread must answer.

        Args:
            is_alone: no other change is on its way.
        """
        ...

    def clock(self) -> int:
        """The engine's time, in nanoseconds."""
        ...
