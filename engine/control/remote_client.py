"""The way of the engine's replies: `RemoteClient`, the `Outbox`, and `Replies` to the socket.

`Outbox` is the queue of replies for the thread that owns the socket. Most are outputs of one token,
and sending a message takes many times as long as encoding such an output. So if several outputs
for a client are ready, they go in one message (a bundle).
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import zmq

from stepscope.engine.protocol import replies
from stepscope.engine.protocol.replies import AnyReply, Bundle, Output
from stepscope.engine.text.tokenizer import OutputText
from stepscope.engine.transport.connections import Connections


@dataclass(slots=True, eq=False)
class RemoteClient:
    """The receiver of the answers to one command, at the client that sent it."""

    post: Callable[["Outgoing"], None]
    identity: bytes
    command_id: bytes
    # Identifies the client, on all of its connections, which share one lane of the engine's inbox.
    account: bytes
    text: OutputText | None = None
    once: tuple[bytes, bytes] | None = None  # of a change: its key in `Changes`
    is_bulk: bool = False  # whether `BulkReplies` sends the answer

    def reply(self, message: AnyReply) -> None:
        self.post((self, message))


# A reply for the thread that owns the socket. The engine's thread builds one for each token, and a
# plain tuple takes a tenth of the time of a class.
Outgoing: TypeAlias = tuple[RemoteClient, AnyReply | msgspec.Raw]


class Outbox:
    """A queue of replies: any thread adds, one takes. Readable `descriptor`: a reply waits."""

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


# The queue of a client that does not read is bounded by messages: more outputs in one would let it
# hold more memory, and would hardly be cheaper.
MAX_BUNDLE = 16
_BUNDLE_ID = bytes(8)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
# Bypasses the layer of pyzmq that handles options we do not use: it takes six times as long.
_send = zmq.backend.Socket.send

Forget: TypeAlias = Callable[[bytes, str], None]


class Replies:
    """Sends replies through a ROUTER socket with ROUTER_MANDATORY.

    `forget` is called with a client that cannot be reached, and the reason.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", connections: Connections, forget: Forget
    ) -> None:
        self._socket = socket
        self._connections = connections
        self._forget = forget
        self._bundles: dict[bytes, list[tuple[int, Output]]] = {}  # by identity, none empty

    def send(self, identity: bytes, command_id: bytes, message: AnyReply | msgspec.Raw) -> None:
        """Send a reply at once, but after outputs that wait in the client's bundle."""
        if (bundled := self._bundles.pop(identity, None)) is not None:
            self._send_bundle(identity, bundled)
        self._send(identity, command_id, message)

    def bundle(self, identity: bytes, command_id: bytes, output: Output) -> None:
        """Add an output to the client's bundle, which is sent when full, or by `send_bundles`."""
        if output.logprobs is not None or len(output.token_ids) > 1:
            self.send(identity, command_id, output)  # as large as a bundle
            return
        bundled = self._bundles.setdefault(identity, [])
        bundled.append((int.from_bytes(command_id, "big"), output))
        if len(bundled) == MAX_BUNDLE:
            del self._bundles[identity]
            self._send_bundle(identity, bundled)

    def send_bundles(self) -> None:
        bundles, self._bundles = self._bundles, {}
        for identity, bundled in bundles.items():
            self._send_bundle(identity, bundled)

    def _send_bundle(self, identity: bytes, bundled: list[tuple[int, Output]]) -> None:
        if len(bundled) == 1:
            ((command_id, output),) = bundled
            self._send(identity, command_id.to_bytes(8, "big"), output)
        else:
            self._send(identity, _BUNDLE_ID, Bundle(outputs=bundled))

    def _send(self, identity: bytes, command_id: bytes, message: AnyReply | msgspec.Raw) -> None:
        if not self._connections.is_welcome(identity):
            self._forget(identity, "its key is revoked")
            return
        try:
            _send(self._socket, identity, _MORE)
            # If the first frame found room in the queue, the other frames do too.
            _send(self._socket, command_id, _MORE)
            _send(self._socket, replies.encode(message), _LAST)
        except zmq.ZMQError as error:
            # Gone (EHOSTUNREACH), or its queue is full because it does not read (EAGAIN).
            self._forget(identity, str(error))
