"""`Connections`: the clients of a control socket, their keys, and their unfinished requests.

Belongs to the control thread.
"""

import zmq
from zmq.utils.monitor import recv_monitor_message

from stepscope.engine.protocol.commands import Asker
from stepscope.engine.transport.gate import Gate
from stepscope.engine.transport.keys import Holder


class Connections:
    """The connected clients, by the identity that the ROUTER socket gives them."""

    def __init__(self, socket: "zmq.Socket[bytes]", gate: Gate | None) -> None:
        # If we send nothing to a client, only the end of its connection shows that it is gone.
        self._socket = socket
        self.lost: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._gate = gate
        self._identities: dict[int, bytes] = {}  # by the file descriptor of their connection
        self._keys: dict[bytes, str] = {}  # public key of each identity
        self._requests: dict[bytes, set[int]] = {}  # unfinished requests of each identity

    def close(self) -> None:
        self._socket.disable_monitor()
        self.lost.close()

    def note(self, identity: bytes, frame: zmq.Frame) -> list[bytes]:
        """Take note of a message's sender. Returns other clients that were found to be gone."""
        try:
            descriptor = frame.get(zmq.SRCFD)
            assert isinstance(descriptor, int)
        except zmq.ZMQError:
            return []  # a client with ZMTP 2 or older, which libzmq accepts only without keys
        if self._identities.get(descriptor) == identity:
            return []
        # The descriptor is new, or had another client before; that one was reported lost before
        # the number could be reused.
        gone = self.take_lost()
        self._identities[descriptor] = identity
        if self._gate is not None:
            public = frame.get("User-Id")
            assert isinstance(public, str)
            self._keys[identity] = public
            self._gate.note(descriptor, public)
        return gone

    def take_lost(self) -> list[bytes]:
        """Return the identities of the clients whose connection was lost since the last call."""
        gone = []
        while self.lost.poll(0):
            descriptor = recv_monitor_message(self.lost)["value"]
            identity = self._identities.pop(int(descriptor), None)
            if identity is not None:
                self._keys.pop(identity, None)
                gone.append(identity)
        return gone

    def holder(self, identity: bytes) -> Holder | None:
        """Return the holder of a client's key; None without keys, or if the key was revoked."""
        if self._gate is None:
            return None
        return self._gate.holder(self._keys.get(identity, ""))

    def is_welcome(self, identity: bytes) -> bool:
        """Whether a client may send commands and get replies; False once its key is revoked."""
        return self._gate is None or self.holder(identity) is not None

    def key(self, identity: bytes) -> bytes:
        """The client's public key; empty if the socket asks for no keys."""
        return self._keys.get(identity, "").encode()

    def account(self, identity: bytes) -> bytes:
        """Return the id under which rate limits count a client: its key's, else its own."""
        key = self.key(identity)
        if self._gate is None or key == self._gate.local.pair.public.encode():
            return identity  # programs of one user; each has limits of its own
        return key

    def asker(self, identity: bytes, who: str) -> Asker:
        holder = self.holder(identity)
        return Asker(who, None if holder is None else holder.name)

    # Requests

    def add_request(self, identity: bytes, request_id: int) -> None:
        self._requests.setdefault(identity, set()).add(request_id)

    def end_request(self, identity: bytes, request_id: int) -> None:
        self._requests.get(identity, set()).discard(request_id)

    def take_requests(self, identity: bytes) -> list[int]:
        return sorted(self._requests.pop(identity, set()))
