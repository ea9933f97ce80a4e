"""`SnapshotDesk`: gives snapshots to clients, and bounds what that costs the engine.

A snapshot is made between two steps, on the engine's thread, by a walk over all blocks and
requests. Snapshots take at most `SHARE` of the engine's time, however many clients ask. A client
that asks too soon after the last snapshot waits, at most `MAX_WAIT_NS`, and all waiting clients get
the same snapshot. It is always made after they asked, so that it includes the effect of every
command that was answered before.
"""

from collections.abc import Callable

from stepscope.engine.loop.inbox import Client
from stepscope.engine.protocol.wire import Snapshot

SHARE = 0.01
MAX_WAIT_NS = 1_000_000_000


class SnapshotDesk:
    """The clients that wait for a snapshot, and the earliest time of the next snapshot.

    Belongs to the engine's thread.

    Args:
        take: makes a snapshot.
        clock: nanoseconds, of the engine.
    """

    def __init__(self, take: Callable[[], Snapshot], clock: Callable[[], int]) -> None:
        self._take = take
        self._clock = clock
        self._waiting: list[Client] = []
        self._next_ns = 0  # the next snapshot is made no earlier

    def ask(self, client: Client) -> None:
        """Queue `client`: it gets a snapshot in one of the next calls of `serve`."""
        self._waiting.append(client)

    @property
    def due_ns(self) -> int | None:
        """When to call `serve`; None if no client waits."""
        return self._next_ns if self._waiting else None

    def serve(self, *, at_once: bool = False) -> None:
        """Send a snapshot to all waiting clients, if one is due. Call it between steps.

        Args:
            at_once: send it even if it is not due.
        """
        if not self._waiting:
            return
        start_ns = self._clock()
        if start_ns < self._next_ns and not at_once:
            return
        snapshot = self._take()
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            client.reply(snapshot)
        end_ns = self._clock()
        self._next_ns = end_ns + min(round((end_ns - start_ns) / SHARE), MAX_WAIT_NS)
