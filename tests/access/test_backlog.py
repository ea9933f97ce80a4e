"""A client that sends an endless message is cut off before it fills memory; others stay."""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import EngineUnreachable
from stepscope.engine.protocol.commands import GetAudit
from stepscope.engine.protocol.replies import AuditPage
from stepscope.engine.protocol.wire import Audited
from stepscope.engine.transport import backlog
from stepscope.engine.transport.backlog import MAX_HELD_BYTES, Backlog, wire_bytes

ENGINE = str(Path(__file__).parents[1] / "support" / "engines" / "simulated_engine.py")
FRAME = bytes(64 * 1024)


def free_port() -> int:
    """A free port whose next port is free too."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    engine = subprocess.Popen(
        [sys.executable, ENGINE, f"tcp://127.0.0.1:{port}"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("run"))},
    )
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            with ControlClient(f"tcp://127.0.0.1:{port}", timeout_s=0.3) as client:
                client.info()
                break
        except EngineUnreachable:
            assert engine.poll() is None
    yield port
    engine.kill()
    engine.wait()


def zmtp(port: int, kind: bytes) -> socket.socket:
    """A connection that has said hello (ZMTP 3.0, NULL), and may send any frames now."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    connection.sendall(greeting)
    received = b""
    while len(received) < len(greeting):
        received += connection.recv(len(greeting) - len(received))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    connection.sendall(bytes([4, len(ready)]) + ready)
    return connection


def send_without_end(connection: socket.socket) -> int:
    """Send a message that never ends; return the bytes sent until the connection was cut."""
    frame = b"\x03" + struct.pack(">Q", len(FRAME)) + FRAME
    num_bytes = 0
    while num_bytes < 16 * MAX_HELD_BYTES:
        try:
            connection.sendall(frame)
        except OSError:
            break
        num_bytes += len(frame)
    connection.close()
    return num_bytes


def entries(client: ControlClient) -> list[Audited]:
    page = client.ask(GetAudit())
    assert isinstance(page, AuditPage)
    return [entry for entry in page.entries if entry.code == "backlog"]


def test_an_endless_message_on_either_socket_closes_its_connection_and_is_audited(
    port: int,
) -> None:
    with ControlClient(f"tcp://127.0.0.1:{port}", timeout_s=20.0) as client:
        for offset, kind in ((0, b"DEALER"), (1, b"SUB")):
            before = len(entries(client))
            num_bytes = send_without_end(zmtp(port + offset, kind))
            assert num_bytes < 8 * MAX_HELD_BYTES
            # The audit reports the second flood together with others of the same five seconds.
            deadline_s = time.monotonic() + 30
            while len(found := entries(client)) == before and time.monotonic() < deadline_s:
                time.sleep(0.2)
            (entry,) = found[before:]
            assert "cut off" in entry.detail
        assert client.info().name


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_bytes_that_the_engine_has_read_do_not_count_against_a_client(
    is_encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "GROWN_BYTES", -(1 << 50))  # look each time
    monkeypatch.setattr(backlog, "MAX_HELD_BYTES", 10_000)
    context = zmq.Context.instance()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    if is_encrypted:
        public, secret = zmq.curve_keypair()
        server.curve_server = True
        server.curve_secretkey = client.curve_secretkey = secret
        client.curve_serverkey = client.curve_publickey = public
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    now_s, taken = 0.0, 0
    addresses = [f"tcp://127.0.0.1:{port}", "ipc:///x"]
    watch = Backlog(addresses, lambda _: taken, lambda _: 0, lambda: now_s)
    for size in (0, 1, 200, 255, 256, 5_000, 200_000):
        client.send_multipart([bytes(8), bytes(size)])
        frames = server.recv_multipart()[1:]
        taken += sum(wire_bytes(len(frame), is_encrypted=is_encrypted) for frame in frames)
        now_s += 1
        assert watch.cut_off() == []  # a handshake is all that is over
    client.send_multipart([bytes(8), bytes(8_000)], zmq.SNDMORE)
    client.send(bytes(8_000))
    assert server.poll(5_000)
    now_s += 1
    (held,) = watch.cut_off()
    assert 12_000 < held < 17_000
    assert watch.wait_s == backlog.MIN_CHECK_S
    assert Backlog(["ipc:///x"], lambda _: 0, lambda _: 0).wait_s is None
    for each in (server, client):
        each.close(linger=0)


def test_a_connection_counts_once_though_a_closed_descriptor_number_is_also_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "GROWN_BYTES", -(1 << 50))  # look each time
    monkeypatch.setattr(backlog, "MAX_HELD_BYTES", 10_000)
    now_s = 0.0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        with socket.create_connection(address) as client, listening.accept()[0] as held:
            client.sendall(bytes(20_000))
            num_left = 20_000
            while num_left:
                num_left -= len(held.recv(num_left))
            watch = Backlog(
                [f"tcp://127.0.0.1:{address[1]}"], lambda _: 0, lambda _: 0, lambda: now_s
            )
            with open(os.devnull) as free:
                number = free.fileno()  # like the one used for listing: closed, but listed
            names = [str(held.fileno()), str(number)]
            monkeypatch.setattr(os, "listdir", lambda _: names)
            now_s += 1
            assert len(watch.cut_off()) == 1


def test_a_client_with_large_replies_is_cut_off_only_if_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "GROWN_BYTES", -(1 << 50))  # look each time
    monkeypatch.setattr(backlog, "MAX_HELD_BYTES", 20_000_000)  # more than the kernel's buffers
    now_s, size = 0.0, 250_000
    with closing(zmq.Context.instance().socket(zmq.ROUTER)) as server:
        server.linger, server.sndhwm = 0, 10_000
        port = server.bind_to_random_port("tcp://127.0.0.1")
        sent: dict[int, int] = {}
        watch = Backlog(
            [f"tcp://127.0.0.1:{port}"], lambda _: 10**9, lambda fd: sent.get(fd, 0), lambda: now_s
        )
        with closing(zmtp(port, b"DEALER")) as client:
            client.sendall(b"\x00\x01x")
            frames = server.recv_multipart(copy=False)
            identity, descriptor = frames[0].bytes, int(frames[-1].get(zmq.SRCFD))
            for _ in range(120):  # 30 MB, all read by the client
                server.send_multipart([identity, bytes(size)])
                sent[descriptor] = sent.get(descriptor, 0) + size
                num_left = size
                while num_left > 0:
                    num_left -= len(client.recv(num_left))
            now_s += 1
            assert watch.cut_off() == []
            for _ in range(120):
                server.send_multipart([identity, bytes(size)])
                sent[descriptor] += size
            now_s += 1
            (held,) = watch.cut_off()
            assert 20_000_000 < held < 30_100_000
