"""Floods a control socket: `flooder.py ENDPOINT SECONDS SEED`. No command of it takes effect."""

import random
import sys
import time

import zmq

from stepscope.engine.protocol import commands
from stepscope.engine.protocol.commands import GetAudit, GetInfo, GetSnapshot, ReplayFrom, SetKnobs

NUM_CLIENTS, RATE = 16, 2_000
PAYLOADS = (
    b"\xc1" * 40,
    commands.encode(GetInfo()),
    commands.encode(GetAudit()),
    commands.encode(GetSnapshot()),
    commands.encode(ReplayFrom(sequence=0, limit=10_000)),
    commands.encode(SetKnobs(changes={"max_num_seqs": 0}, who="flooder")),
    commands.encode(SetKnobs(changes={"max_num_seqs": 8}, expected_version=-1, who="flooder")),
)


def main() -> None:
    endpoint, seconds, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    payload = random.Random(seed).choice(PAYLOADS)
    sockets = []
    for _ in range(NUM_CLIENTS):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(endpoint)
        sockets.append(socket)
    number, start_s = 0, time.monotonic()
    while (now_s := time.monotonic()) < start_s + seconds:
        while number < (now_s - start_s) * RATE:
            number += 1
            sender = sockets[number % NUM_CLIENTS]
            if sender.poll(0, zmq.POLLOUT):
                sender.send_multipart([number.to_bytes(8, "big"), payload])
        for each in sockets:
            while each.poll(0):
                each.recv_multipart()
        time.sleep(0.01)
    for each in sockets:
        each.close()


if __name__ == "__main__":
    main()
