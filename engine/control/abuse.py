"""`Abuse`: writes clients that exceeded a limit to the audit trail. Use it on the control thread.

The `RateLimiter` refuses commands of a client that sends too many. The `Backlog` disconnects a
client with too many bytes of unfinished or unread messages. `Abuse` makes an audit entry of both.
"""

import logging
from collections.abc import Iterator

from stepscope.engine.loop.inbox import Denial
from stepscope.engine.protocol.asker import Asker
from stepscope.engine.transport.backlog import Backlog
from stepscope.engine.transport.connections import Connections
from stepscope.engine.transport.rate_limit import RateLimiter

log = logging.getLogger("stepscope.engine")


class Abuse:
    """Turns what the limiter and the backlog have refused into audit entries.

    Args:
        connections: tell who a client is.
    """

    def __init__(self, limiter: RateLimiter, backlog: Backlog, connections: Connections) -> None:
        self._limiter = limiter
        self._backlog = backlog
        self._connections = connections
        self._flooders: dict[bytes, tuple[Asker, str]] = {}  # not reported yet, by account

    def note(self, account: bytes, identity: bytes) -> None:
        """Note that the limiter refused a command of a client.

        Looks up who the client is now, because its connection may soon be gone.
        """
        if account not in self._flooders:
            self._flooders[account] = self._connections.described(identity)

    @property
    def wait_s(self) -> float | None:
        """Seconds until `denials` may yield something.

        None: it will yield nothing before the next message arrives.
        """
        waits_s = (self._limiter.next_report_s, self._backlog.wait_s)
        return min((each_s for each_s in waits_s if each_s is not None), default=None)

    def denials(self) -> Iterator[Denial]:
        """Yield an audit entry for all that was refused since the last call, per client.

        Call it after each message and after `wait_s`.
        """
        for account, count in self._limiter.floods():
            asker, known = self._flooders.pop(account)
            log.warning("refused %d commands of %s: too many in a short time", count, asker.name)
            message = f"{count:,} commands beyond what one client may send were refused"
            message += f" ({known})" if known else ""
            yield Denial(asker, "", "rate_limited", message, count, lane=account)
        for num_bytes in self._backlog.cut_off():
            held = f"{num_bytes >> 20} MiB of unfinished or unread messages"
            message = f"a connection with {held} was cut off"
            log.warning("%s", message)
            yield Denial(Asker("a client"), "", "backlog", message, lane=b"backlog")
