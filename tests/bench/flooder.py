"""Floods a control socket until it is killed: `flooder.py ADDRESS PAYLOAD RATE HOW [KEY ...]`.

PAYLOAD is in hexadecimal, RATE in messages a second, HOW a word of `bench_flood.Flood`. Each KEY
is a client; without any there are 16.
"""

import contextlib
import sys
import time
from pathlib import Path

import zmq

from stepscope.engine.protocol import commands, replies
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import read_credentials
from stepscope.engine.transport.sockets import client_socket


def main() -> None:
    address, payload, rate, how = sys.argv[1], bytes.fromhex(sys.argv[2]), *sys.argv[3:5]
    ends = [Endpoint(address, read_credentials(Path(path))) for path in sys.argv[5:]]
    ends = ends or [Endpoint(address)] * 16
    if how == "huge":
        payload *= 2**19 // len(payload)

    def opened(end: Endpoint) -> "zmq.Socket[bytes]":
        socket = client_socket(zmq.DEALER, end)
        socket.connect(address)
        return socket

    sockets = [opened(end) for end in ends]
    number, begin_s = 0, time.monotonic()
    while True:
        time.sleep(0.01)
        due = int((time.monotonic() - begin_s) * float(rate))
        while number < due:
            number += 1
            place = number % len(sockets)
            if how == "anew" and number % 20 == 0:  # who is not let in tries again at once
                sockets[place].close()
                sockets[place] = opened(ends[place])
            with contextlib.suppress(zmq.Again):
                sockets[place].send_multipart([number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        for socket in sockets:
            with contextlib.suppress(zmq.Again):
                while True:
                    reply = socket.recv_multipart(zmq.NOBLOCK)[-1]
                    if how != "aborts":
                        continue
                    submitted = replies.decode_reply(reply)
                    if isinstance(submitted, replies.Submitted):
                        abort = commands.encode(commands.Abort(request_id=submitted.request_id))
                        socket.send_multipart([bytes(8), abort], zmq.NOBLOCK)


if __name__ == "__main__":
    main()
