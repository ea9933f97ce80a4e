"""`ControlTally`: counts what the control socket refuses."""

from stepscope.engine.protocol.wire import ControlCounts
from stepscope.engine.transport.gate import Gate


class ControlTally:
    """Counts of refused messages. The control thread counts; any thread may read."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.num_bad_messages = 0  # messages that were no command
        self.num_limited = 0  # messages over the rate limit
        self.num_denied = 0  # commands that need an operator's key but came with a viewer's
        self._gate = gate

    def counts(self) -> ControlCounts | None:
        """Return all counts; None if nothing was refused."""
        num_keyless = 0 if self._gate is None else self._gate.num_refused
        found = (self.num_bad_messages, self.num_limited, self.num_denied, num_keyless)
        return ControlCounts(*found) if any(found) else None
