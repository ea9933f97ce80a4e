"""`RemoteClient`: receives the engine's answers to one command that came by the control socket.

`Outbox` is the queue of these answers for the thread that owns the socket. It has a file descriptor
that wakes this thread.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from stepscope.engine.protocol.replies import AnyReply
from stepscope.engine.text.output_text import OutputText


class RemoteClient:
    """The receiver of the answers to one command, at the client that sent it.

    Args:
        once: for a change, its key in `AnswerBook`.
        bundles: whether outputs may be sent in one message with other outputs.
        account: identifies the client, on all of its connections. They share one lane of the
            engine's inbox.
        is_bulk: whether `BulkReplies` sends the answer.
    """

    def __init__(
        self,
        post: Callable[["Outgoing"], None],
        identity: bytes,
        command_id: bytes,
        text: OutputText | None = None,
        once: tuple[bytes, bytes] | None = None,
        bundles: bool = False,
        account: bytes = b"",
        is_bulk: bool = False,
    ) -> None:
        self._post = post
        self.identity = identity
        self.command_id = command_id
        self.text = text
        self.once = once
        self.bundles = bundles
        self.account = account or identity
        self.is_bulk = is_bulk

    def reply(self, message: AnyReply) -> None:
        self._post((self, message))


# A reply for the thread that owns the socket. The engine's thread builds one for each token, and a
# plain tuple takes a tenth of the time of a class.
Outgoing: TypeAlias = tuple[RemoteClient, AnyReply | msgspec.Raw]


class Outbox:
    """A queue of replies. Any thread may add replies, and only one thread takes them.

    Attributes:
        descriptor: a file descriptor for a poller, readable when a new reply waits.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outgoing] = deque()
        self._is_woken = False  # True from a wake-up until the reader calls `awake`
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def post(self, outgoing: Outgoing) -> None:
        self._waiting.append(outgoing)
        self.wake()

    def wake(self) -> None:
        # A step may post hundreds; only the first wakes the reader. The others are read with it,
        # because `awake` clears the flag before the reader looks.
        if not self._is_woken:
            self._is_woken = True
            os.write(self._write, b"\0")

    def awake(self) -> None:
        """Make `descriptor` unreadable until the next reply. Call it before `take`."""
        os.read(self.descriptor, 65536)
        self._is_woken = False

    def take(self) -> Iterator[Outgoing]:
        """Yield the replies that wait now, oldest first. A later reply wakes the reader again."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def close(self) -> None:
        self._is_woken = True  # so that no later post writes to a reused descriptor number
        os.close(self.descriptor)
        os.close(self._write)
