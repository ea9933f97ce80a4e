"""Makes every ZeroMQ socket that connects to other processes, so that all of them check keys.

A server socket is private to this user (`ipc`) or has a `Gate`. A client socket uses the key for
its endpoint, if the endpoint asks for one.
"""

import contextlib
import os
import stat
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.gate import ZAP_DOMAIN, Gate, stand_back
from stepscope.engine.transport.keys import Credentials, find_credentials, read_credentials
from stepscope.engine.transport.local_engines import local_credentials

KEY_VARIABLE = "STEPSCOPE_CLIENT_KEY"  # path of a key file, never the key itself
HANDSHAKE_MS = 5_000
RECONNECT_MS, MAX_RECONNECT_MS = 100, 1_000
STALLED_MS = 60_000  # a connection whose client reads nothing for this long is closed
_KEEP_ALIVE = {  # first probe after 10 s of silence, given up after 25 s
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_ENOUGH = 2  # failed handshakes in a row before `refusal` gives a reason
_IPC = "ipc://"
_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


def server_socket(kind: int, gate: Gate | None) -> "zmq.Socket[bytes]":
    """Make a socket to be bound; the caller sets other options. `gate`: checks who gets in."""
    context = zmq.Context.instance() if gate is None else gate.context
    stand_back(context)
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # TCP keep-alive finds clients that vanish. libzmq's heartbeats would, too, but 4.3 aborts the
    # process when one is due on a connection that was lost while its receive queue was full.
    for option, value in _KEEP_ALIVE.items():
        socket.setsockopt(option, value)
    # The high-water mark counts messages, which may be large; this bounds what waits unread.
    socket.setsockopt(zmq.TCP_MAXRT, STALLED_MS)
    with contextlib.suppress(zmq.ZMQError):  # not on every platform
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    if gate is not None:
        socket.curve_server = True
        socket.curve_secretkey = gate.server.secret.encode()
        socket.curve_publickey = gate.server.public.encode()
        socket.zap_domain = ZAP_DOMAIN
        # Without it libzmq would let every client in if the gate does not answer.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return socket


def bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Bind a socket; an `ipc` file is private from the beginning. Raises ConfigError."""
    before = os.umask(0o177)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError("bad_endpoint", f"cannot listen on {address}: {error}") from error
    finally:
        os.umask(before)
    if address.startswith(_IPC):
        path = Path(address.removeprefix(_IPC))
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)


def client_socket(kind: int, endpoint: Endpoint | None) -> "zmq.Socket[bytes]":
    """Make a socket to connect to `endpoint`; None: to an engine in this process, without a key.

    The caller sets all other options. Raises ConfigError: the endpoint's key cannot be used.
    """
    credentials = None if endpoint is None else credentials_for(endpoint)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if credentials is not None:
        socket.curve_publickey = credentials.pair.public.encode()
        socket.curve_secretkey = credentials.pair.secret.encode()
        socket.curve_serverkey = credentials.server.encode()
    return socket


def credentials_for(endpoint: Endpoint) -> Credentials | None:
    """Find the key for an endpoint; None if it asks for none, or none was found.

    It is the first of: the endpoint's own `credentials`; the file in the environment variable; that
    in the lock file of this user's engine on this machine; a file in the client's key folder.

    Raises ConfigError: there is a key file that cannot be used.
    """
    if endpoint.credentials is not None:
        return endpoint.credentials
    is_here, local = local_credentials(endpoint)
    if is_here and local is None:
        return None  # this engine asks for no key
    if path := os.environ.get(KEY_VARIABLE):
        return read_credentials(Path(path).expanduser())
    if is_here:
        return local
    return find_credentials(endpoint.control, is_remote=not endpoint.is_private)


class Handshakes:
    """Finds out why an engine refuses a client socket. Make it before the socket connects."""

    def __init__(self, socket: "zmq.Socket[bytes]", endpoint: Endpoint) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._has_key = bool(socket.get(zmq.MECHANISM) == zmq.CURVE)
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._refusal: str | None = None
        self._num_failed = 0  # in a row

    def refusal(self) -> str | None:
        """Return why handshakes fail and what to do; None if one succeeded, or it is too early."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind, value = int(event["event"]), int(event["value"])
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusal, self._num_failed = None, 0
                continue
            # A failure without detail may only mean that the engine is starting or ending; the
            # other kinds are certain.
            is_certain = kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            self._num_failed += _ENOUGH if is_certain else 1
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                why = "does not know this key (any more); on its machine: stepscope keys list"
            elif not self._has_key:
                why = "belongs to another user, or " if self._endpoint.is_ipc else ""
                why += "asks for a key: on its machine 'stepscope keys new NAME --role viewer' "
                why += "makes one, here --key FILE names it"
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
                why = "takes no keys: leave out --key"
            else:
                why = "is not the one that this key is for, or its key has changed; get a new key "
                why += "file from its machine"
            self._refusal = f"the engine at {self._endpoint.control} {why}"
        return self._refusal if self._num_failed >= _ENOUGH else None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
