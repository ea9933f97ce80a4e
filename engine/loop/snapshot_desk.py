"""`SnapshotDesk`: gives snapshots to clients, and bounds what that costs the engine.

A snapshot is made between two steps, on the engine's thread: a walk over all blocks and requests.
However many ask, and however often, making them takes no more than `SHARE` of the engine's time:
who comes too soon after the last one waits, at most `MAX_WAIT_NS`, and all who wait get the same.
It is always made after it was asked for, so that a client finds in it what earlier answers said.
"""

from collections.abc import Callable

from stepscope.engine.loop.inbox import Client
from stepscope.engine.protocol.wire import Snapshot

SHARE = 0.01
MAX_WAIT_NS = 1_000_000_000


class SnapshotDesk:
    """Belongs to the engine's thread.

    Args:
        take: makes a snapshot.
        clock: nanoseconds, of the engine.
    """

    def __init__(self, take: Callable[[], Snapshot], clock: Callable[[], int]) -> None:
        self._take = take
        self._clock = clock
        self._waiting: list[Client] = []
        self._next_ns = 0  # no other before

    def ask(self, client: Client) -> None:
        """`client` gets a snapshot at one of the next calls of `serve`."""
        self._waiting.append(client)

    @property
    def due_ns(self) -> int | None:
        """When `serve` is to be called for those who wait; None: none waits."""
        return self._next_ns if self._waiting else None

    def serve(self, *, at_once: bool = False) -> None:
        """Answer all who wait, if the time has come or `at_once`. To be called between steps."""
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
