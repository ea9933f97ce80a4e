"""`Gate`: decides by their keys which clients may connect. Its thread answers libzmq's questions.

libzmq asks the gate about every CURVE handshake (ZAP, rfc.zeromq.org/spec/27); without an answer no
client gets in. The gate reads the key folder again when the folder changes, and cuts off
connections whose keys were removed.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import zmq
from zmq.utils import z85

from stepscope.engine.protocol.commands import LOCAL
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import Credentials, Holder, KeyFolder, KeyPair
from stepscope.engine.transport.rate_limit import is_out_of_files


def stand_back(context: "zmq.Context[Any]") -> None:
    """Keep the I/O threads of a context from interrupting the engine's thread.

    The message of each step wakes the I/O threads, and Linux would let them interrupt the thread
    that has just sent it. With five subscribers that cost the engine more time than all other work
    for telemetry. With SCHED_BATCH the I/O threads interrupt no thread: they use a free core, or
    else wait a few milliseconds at most. Call it before the context's first socket is made.
    """
    with contextlib.suppress(AttributeError, zmq.ZMQError):  # Linux only
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)


log = logging.getLogger("stepscope.engine")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"stepscope"
CHECK_S = 0.25  # between two checks of the folder
_LOG_S = 5.0  # between two lines on the same trouble


@final
class Gate:
    """Lets in clients with an authorised key, and clients of this user on this machine.

    Raises ConfigError: the folder or a file in it cannot be used.
    """

    def __init__(self, folder: KeyFolder) -> None:
        folder.check()
        self._folder = folder
        self.server = folder.server_pair()
        pair = KeyPair.new()
        # The key for clients of this user on this machine, made new for each gate. They find it in
        # the lock file, which only this user can read.
        self.local = Credentials(pair, self.server.public, LOCAL)
        self._local = Holder(LOCAL, "operator", pair.public)
        self._signature: object = None
        self._holders: Mapping[str, Holder] = self._with_local({})
        # By descriptor: the key, and the addresses, by which a later connection on it differs.
        self._connections: dict[int, tuple[str, tuple[object, object]]] = {}
        self._lock = threading.Lock()
        self.num_refused = 0
        self._next_log_s = 0.0
        self._read_again()
        self._closing = threading.Event()
        # The gate only works for sockets of this context.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stand_back(self.context)
        self._zap: zmq.Socket[bytes] = self.context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Call it when all sockets of the context are closed."""
        self._closing.set()
        self._thread.join()
        self.context.destroy(linger=0)

    def holder(self, public: str) -> Holder | None:
        """Return the holder of a public key; None if the key is not (or no longer) authorised."""
        return self._holders.get(public)

    def note(self, descriptor: int, public: str) -> None:
        """Note which key the connection on a file descriptor belongs to. From any thread."""
        with contextlib.suppress(OSError):  # it has ended meanwhile
            addresses = _addresses(descriptor)
            with self._lock:
                self._connections[descriptor] = public, addresses
        if self.holder(public) is None:  # revoked since its handshake
            self._cut_off()

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        next_check_s = time.monotonic() + CHECK_S
        try:
            while not self._closing.is_set():
                if poller.poll(round(CHECK_S * 1000)):
                    self._answer(self._zap.recv_multipart())
                if time.monotonic() >= next_check_s:
                    self._read_again()
                    next_check_s = time.monotonic() + CHECK_S
        finally:
            self._zap.close()

    def _answer(self, asked: list[bytes]) -> None:
        """Answer a ZAP request: version, id, domain, address, identity, mechanism, credentials."""
        public = ""
        if len(asked) == 7 and asked[5] == b"CURVE" and len(asked[6]) == 32:
            public = z85.encode(asked[6]).decode()
            self._read_again()  # a key that was just made, or just revoked, counts at once
        known = self.holder(public) is not None
        if not known:
            self.num_refused += 1
            if time.monotonic() >= self._next_log_s:
                self._next_log_s = time.monotonic() + _LOG_S
                where = asked[3].decode(errors="replace") if len(asked) > 3 else "?"
                log.warning("no authorised key: refused a client at %s", where or "a local socket")
        status = (b"200", b"OK", public.encode()) if known else (b"400", b"not authorised", b"")
        self._zap.send_multipart([b"1.0", asked[1] if len(asked) > 1 else b"", *status, b""])

    def _read_again(self) -> None:
        broken: list[str] = []
        holders, signature = dict[str, Holder](), None
        try:
            self._folder.check()
            signature = self._folder.signature()
            if signature == self._signature:
                return
            holders = self._folder.holders(broken)
        except (ConfigError, OSError) as error:
            if isinstance(error, OSError) and is_out_of_files(error):
                return  # strangers may have used them up: keep the known keys
            # If the folder cannot be trusted, no client gets in, and none stays.
            if self._signature is not None:
                broken.append(f"only the local key is accepted now: {error}")
        self._signature = signature
        for line in broken:
            log.error("%s", line)
        before, self._holders = self._holders, self._with_local(holders)
        for public in before.keys() - self._holders.keys():
            log.info("the key of %s is revoked", before[public].name)
        self._cut_off()

    def _cut_off(self) -> None:
        with self._lock:
            for descriptor, (public, addresses) in list(self._connections.items()):
                if self.holder(public) is None:
                    del self._connections[descriptor]
                    _shut_down(descriptor, addresses)

    def _with_local(self, holders: Mapping[str, Holder]) -> dict[str, Holder]:
        return {**holders, self._local.public: self._local}


@contextlib.contextmanager
def gate_of(folder: str, endpoint: Endpoint) -> Iterator[Gate | None]:
    """Make the gate of an endpoint; None if the endpoint is private and no folder is given.

    `folder`: of authorised keys; "": the default one. Raises ConfigError: strangers can reach the
    endpoint and no key is authorised, or the folder cannot be used.
    """
    if not folder and endpoint.is_private:
        yield None
        return
    keys = KeyFolder(Path(folder).expanduser().absolute() if folder else None)
    if not endpoint.is_private and not (keys.path.is_dir() and keys.holders()):
        options = f" --keys {folder}" if folder else ""
        raise ConfigError(
            "public_bind",
            f"{endpoint.control} can be reached from other machines, and no key is authorised: "
            f"first 'stepscope keys new NAME --role operator{options}', or bind "
            "tcp://127.0.0.1:PORT and reach it through ssh -L",
        )
    gate = Gate(keys)
    try:
        yield gate
    finally:
        gate.close()


def _addresses(descriptor: int) -> tuple[object, object]:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getsockname(), connection.getpeername()


def _shut_down(descriptor: int, addresses: tuple[object, object]) -> None:
    """Shut down a connection that libzmq owns; libzmq then sees it as closed by the peer."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if (connection.getsockname(), connection.getpeername()) == addresses:
            connection.shutdown(socket.SHUT_RDWR)
