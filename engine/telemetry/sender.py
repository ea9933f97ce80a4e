"""`Sender`: keeps telemetry messages and sends them, from a thread in C if it could be compiled.

The engine's thread copies a message into a ring (`native/kept_messages.c`). The thread in C never
needs Python's interpreter lock. It looks for new messages every 1 to 4 ms (`native/sender.c`); only
if there were none for a tenth of a second must it be woken.

Without a compiler, the engine's thread sends the messages itself (`InlineSender`). That costs more,
because waking libzmq's thread costs more than everything else about a record. Telemetry to one
subscriber then takes 2.5 % of a step of 5 ms, in place of 0.9 % with the thread in C; to three, at
least 3 % in place of 0.9 % (`tests/bench/bench_wire.py --inline`, two AVX2 cores). So the C stays.
"""

import contextlib
import ctypes
import threading
import time
from typing import TypeAlias

import zmq

from stepscope.engine.protocol import wire

# Room for messages that wait to be sent, even if the ring keeps fewer for replay.
QUEUE_MESSAGES = 10_000
QUEUE_BYTES = 32 * 1024 * 1024
LOOK_S = 0.05  # how often the engine's thread looks for new subscriptions
MAX_SUBSCRIPTIONS = 100  # of one look, because strangers may send many and the engine waits

compiled: "type[_sender.Sender] | None" = None
with contextlib.suppress(ImportError):  # the package was installed without a C compiler
    from stepscope.engine.telemetry import _sender

    compiled = _sender.Sender

_FIRST = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
# Skips the layer of pyzmq that checks options we do not use, because every step sends a message.
_send = zmq.backend.Socket.send
_FUNCTIONS = (  # in the order of `Zmq` in `native/sender.h`
    *("zmq_errno", "zmq_send", "zmq_setsockopt", "zmq_msg_init", "zmq_msg_init_size"),
    *("zmq_msg_data", "zmq_msg_send", "zmq_msg_recv", "zmq_msg_gets", "zmq_msg_get"),
    "zmq_msg_close",
)


Sender: TypeAlias = "InlineSender | _sender.Sender"


def open_sender(
    socket: "zmq.Socket[bytes] | None", size: int, max_bytes: int, is_gated: bool
) -> Sender:
    """Make a sender for a bound socket: PUB, or XPUB if there is a gate. In C if possible.

    `socket`: owned by the sender until it is stopped; None to number and keep messages only.
    """
    functions = _functions()
    if compiled is None or functions is None:
        return InlineSender(socket, size, max_bytes, is_gated)
    sender = compiled(size, max_bytes, QUEUE_MESSAGES, QUEUE_BYTES)
    if socket is not None:
        sender.start(socket, socket.underlying, functions, is_gated)
    return sender


def is_compiled() -> bool:
    return compiled is not None and _functions() is not None


class InlineSender:
    """Numbers, keeps and sends messages; `add` sends them itself. The sender in C does the same.

    Any thread may call `add` and `get`; only the owner's thread calls the other methods. The
    threads that publish pass the socket on by a lock: libzmq forbids two of them in a socket, and
    asks for a memory barrier between one and the next.

    Attributes:
        next_sequence: number of the next message that is added.
        oldest_sequence: number of the oldest message that is kept.
        num_bytes: bytes of the kept payloads.
        num_dropped: messages sent so far that at least one subscriber missed.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes] | None", size: int, max_bytes: int, is_gated: bool
    ) -> None:
        self.next_sequence = 0
        self.oldest_sequence = 0
        self.num_bytes = 0
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._size = size
        # Of each message, at its number modulo the size. Bytes alone are no work for the collector.
        self._topics = [b""] * size
        self._payloads = [b""] * size
        self._socket = socket
        self._is_gated = is_gated
        self._next_look_s = 0.0
        self._num_left = 0  # subscriptions that this look may still return
        self._lock = threading.Lock()  # the sender in C relies on the interpreter's lock instead

    def add(self, topic: bytes, payload: bytearray, /) -> int:
        """Keep a message and send it, at once or soon. Never waits. Returns `num_dropped`."""
        with self._lock:
            number = wire.sequence_frame(self.next_sequence)
            self._keep(topic, payload)
            if self._socket is not None:
                self._send(self._socket, topic, number, payload)
            return self.num_dropped

    def _keep(self, topic: bytes, payload: bytearray) -> None:
        sequence = self.next_sequence
        self.num_bytes += len(payload)
        # Drop messages before overwriting them, so that a reader never gets a wrong one.
        while self.oldest_sequence < sequence and (
            sequence - self.oldest_sequence >= self._size or self.num_bytes > self._max_bytes
        ):
            place = self.oldest_sequence % self._size
            self.oldest_sequence += 1
            self.num_bytes -= len(self._payloads[place])
            self._payloads[place] = b""
        place = sequence % self._size
        self._topics[place], self._payloads[place] = topic, bytes(payload)
        self.next_sequence = sequence + 1

    def _send(
        self, socket: "zmq.Socket[bytes]", topic: bytes, number: bytes, payload: bytearray
    ) -> None:
        try:
            _send(socket, topic, _FIRST)
        except zmq.Again:
            # NODROP makes a full queue an error, so that we can count it. Send again without it:
            # the other subscribers must not miss the message.
            self.num_dropped += 1
            socket.setsockopt(zmq.XPUB_NODROP, 0)
            socket.send_multipart((topic, number, payload), zmq.NOBLOCK)
            socket.setsockopt(zmq.XPUB_NODROP, 1)
        else:
            # If the first frame found room, libzmq takes the whole message.
            _send(socket, number, _FIRST)
            _send(socket, payload, _LAST)

    def get(self, sequence: int, /) -> tuple[int, bytes, bytes] | None:
        """Return a message by its number: (number, topic, payload)."""
        if not self.oldest_sequence <= sequence < self.next_sequence:
            return None
        place = sequence % self._size
        kept = sequence, self._topics[place], self._payloads[place]
        return None if sequence < self.oldest_sequence else kept  # dropped while we read it

    def take_subscription(self) -> tuple[str, int] | None:
        """Return the next subscriber of an XPUB socket, (public key, file descriptor), or None."""
        if self._socket is None or not self._is_gated:
            return None
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._num_left = MAX_SUBSCRIPTIONS
        while self._num_left:
            self._num_left -= 1
            try:
                with self._lock:
                    frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._num_left = 0
                break
            with contextlib.suppress(zmq.ZMQError):  # fails if the subscriber has left meanwhile
                public, descriptor = frame.get("User-Id"), frame.get(zmq.SRCFD)
                assert isinstance(public, str)
                assert isinstance(descriptor, int)
                return public, descriptor
        return None

    def stop(self) -> None:
        """Pass all remaining messages to libzmq. After that, the socket may be closed."""
        with self._lock:
            self._socket = None


def _functions() -> tuple[int, ...] | None:
    """Return addresses of functions in pyzmq's libzmq; None if they cannot be found."""
    try:
        from zmq.backend.cython import _zmq  # other backends do not have it

        library = ctypes.CDLL(_zmq.__file__)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _FUNCTIONS]
    except (ImportError, OSError, AttributeError):
        return None
    addresses = tuple(each.value for each in found if each.value)
    return addresses if len(addresses) == len(_FUNCTIONS) else None
