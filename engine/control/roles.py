"""`Roles`: refuses changes that were sent with a viewer's key. Use it on the control thread."""

from stepscope.engine.loop.control_tally import ControlTally
from stepscope.engine.loop.inbox import Denial, Inbox
from stepscope.engine.protocol.commands import Change, Submit
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.connections import Connections


class Roles:
    """Checks whether the role of a client's key permits a command.

    Args:
        connections: tell the role of each client's key.
        inbox: receives denied commands for the audit trail.
        tally: counts denied commands.
    """

    def __init__(self, connections: Connections, inbox: Inbox, tally: ControlTally) -> None:
        self._connections = connections
        self._inbox = inbox
        self._tally = tally

    def check(self, identity: bytes, command: Submit | Change, who: str) -> None:
        """Raise ConfigError if the client's key is a viewer's.

        The refusal goes to the audit trail.
        """
        holder = self._connections.holder(identity)
        if holder is None or holder.role == "operator":
            return
        self._tally.num_denied += 1
        name = type(command).__name__
        message = f"the key of {holder.name} is a viewer's; {command.doing} takes an operator's key"
        asker = self._connections.asker(identity, who)
        lane = self._connections.account(identity)
        self._inbox.put(Denial(asker, name, "viewer", message, lane=lane))
        raise ConfigError("viewer", message)
