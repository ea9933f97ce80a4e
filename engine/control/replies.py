"""`Replies`: sends the control thread's replies, in order for each client.

Most replies are outputs of one token. Sending a message takes many times as long as encoding such
an output. So if several outputs for a client are ready, they go in one message (a bundle), provided
that the client accepts bundles.
"""

from collections.abc import Callable

import msgspec
import zmq

from stepscope.engine.protocol import replies
from stepscope.engine.protocol.replies import AnyReply, Bundle, Output
from stepscope.engine.transport.connections import Connections

# The queue of a client that does not read is bounded by messages: more outputs in one would let it
# hold more memory, and would hardly be cheaper.
MAX_BUNDLE = 16
_BUNDLE_ID = bytes(8)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
# Bypasses the layer of pyzmq that handles options we do not use: it takes six times as long.
_send = zmq.backend.Socket.send


class Replies:
    """Sends replies through a ROUTER socket with ROUTER_MANDATORY.

    Args:
        forget: called with a client that cannot be reached, and the reason.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        connections: Connections,
        forget: Callable[[bytes, str], None],
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
        """Add an output to the client's bundle.

        The bundle is sent when it is full, and at the latest by the next `send_bundles`.
        """
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
