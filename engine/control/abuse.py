"""`Abuse`: writes clients over a limit to the audit trail. Belongs to the control thread.

The `RateLimiter` refuses too many commands, and the `Backlog` cuts off a client with too many
bytes. `Abuse` makes an audit entry of both.
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
    """Reports what the limiter and the backlog have already done.

    Args:
        connections: say who the clients are.
    """

    def __init__(self, limiter: RateLimiter, backlog: Backlog, connections: Connections) -> None:
        self._limiter = limiter
        self._backlog = backlog
        self._connections = connections
        self._flooders: dict[bytes, tuple[Asker, str]] = {}  # not reported yet, by account

    def note(self, account: bytes, identity: bytes) -> None:
        """Note that the limiter refused a command. Keeps who sent it, who may soon be gone."""
        if account not in self._flooders:
            self._flooders[account] = self._connections.described(identity)

    @property
    def wait_s(self) -> float | None:
        """Seconds until `denials` may yield something. None: not before the next message."""
        waits_s = (self._limiter.next_report_s, self._backlog.wait_s)
        return min((each_s for each_s in waits_s if each_s is not None), default=None)

    def denials(self) -> Iterator[Denial]:
        """Yield the refusals not reported yet. Call it after each message and after `wait_s`."""
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
