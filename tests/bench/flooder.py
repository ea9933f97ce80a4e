"""Floods a control socket until it is killed: `flooder.py ADDRESS PAYLOAD RATE HOW [KEY ...]`.

PAYLOAD is in hexadecimal, RATE in messages a second, HOW a word of `bench_flood.Flood`. Each KEY
is a client; without any there are 16.
"""

import contextlib
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import zmq

from stepscope.engine.protocol import commands, replies
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import read_credentials
from stepscope.engine.transport.sockets import client_socket


def due(rate: float) -> Iterator[range]:
    """Every 10 ms the numbers of what is due by then."""
    number, begin_s = 0, time.monotonic()
    while True:
        time.sleep(0.01)
        first, number = number, int((time.monotonic() - begin_s) * rate)
        yield range(first, number)


def flood_messages(address: str, payload: bytes, rate: float, how: str, keys: list[str]) -> None:
    ends = [Endpoint(address, read_credentials(Path(path))) for path in keys]
    ends = ends or [Endpoint(address)] * 16
    if how == "huge":
        payload *= 2**19 // len(payload)

    def opened(end: Endpoint) -> "zmq.Socket[bytes]":
        made = client_socket(zmq.DEALER, end)
        made.connect(address)
        return made

    sockets = [opened(end) for end in ends]
    for numbers in due(rate):
        for number in numbers:
            place = number % len(sockets)
            if how == "anew" and number % 20 == 0:  # who is not let in tries again at once
                sockets[place].close()
                sockets[place] = opened(ends[place])
            with contextlib.suppress(zmq.Again):
                sockets[place].send_multipart([number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        for each in sockets:
            with contextlib.suppress(zmq.Again):
                while True:
                    reply = each.recv_multipart(zmq.NOBLOCK)[-1]
                    submitted = replies.decode_reply(reply) if how == "aborts" else None
                    if isinstance(submitted, replies.Submitted):
                        abort = commands.encode(commands.Abort(request_id=submitted.request_id))
                        each.send_multipart([bytes(8), abort], zmq.NOBLOCK)


def flood_connections(address: str, first_words: bytes, rate: float) -> None:
    """Connections that stop after so many bytes; the oldest of 4,000 is closed, or each at once."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    opened: deque[socket.socket] = deque()
    for numbers in due(rate):
        for _ in numbers:
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection((host, int(port)), timeout=1))
                opened[-1].sendall(first_words)
            while len(opened) > (4_000 if first_words else 0):
                opened.popleft().close()


if __name__ == "__main__":
    address, payload, rate, how, *keys = sys.argv[1:]
    if how == "connections":
        flood_connections(address, bytes.fromhex(payload), float(rate))
    else:
        flood_messages(address, bytes.fromhex(payload), float(rate), how, keys)
