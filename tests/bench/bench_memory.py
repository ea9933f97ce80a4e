"""What an engine's memory does over an hour of load, run as fast as it goes.

A real engine (the demo's model on this machine's CPU) with a KV pool of 64 MB serves as many short
requests as one a second makes in an hour; every 300 of them a client vanishes amid its requests, a
subscriber joins and leaves, and a client floods the control socket. The first part warms it up: the
pages of the KV pool and of the telemetry ring are used for the first time. Afterwards the engine's
memory is to stay within 5 %; ends with 1 where it does not.
"""

import itertools
import sys
import time

import psutil
import zmq
from common import parser
from served import serving

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import SetKnobs, Submit
from stepscope.engine.protocol.replies import Error, Output
from stepscope.engine.protocol.sampling_params import SamplingParams

MOST_GROWTH = 0.05
NUM_AT_ONCE, A_ROUND = 48, 300


def short(length: int, max_tokens: int) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Submit(prompt_token_ids=list(range(1, length + 1)), sampling=sampling)


def serve(client: ControlClient) -> None:
    """Serve a round of short requests, some at once, with the varied lengths of an hour of load."""
    lengths = itertools.islice(itertools.cycle((5, 60, 17, 130, 33, 9, 250, 80)), A_ROUND)
    num_open = 0
    for length in lengths:
        client.send(short(length, 4 + length % 13))
        num_open += 1
        while num_open == NUM_AT_ONCE:
            num_open -= has_ended(client)
    while num_open:
        num_open -= has_ended(client)


def has_ended(client: ControlClient) -> bool:
    """Receive a reply; whether it is the last to its request."""
    received = client.receive(30.0)
    if received is None:
        raise SystemExit("the engine is silent")
    reply = received[1]
    return isinstance(reply, Error) or (
        isinstance(reply, Output) and reply.finish_reason is not None
    )


def make_trouble(endpoint: str, telemetry: str) -> None:
    """Let a client vanish, a subscriber stop reading, and a client flood the engine."""
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.linger = 0
    subscriber.setsockopt(zmq.RCVHWM, 10)
    subscriber.connect(telemetry)
    subscriber.subscribe(b"")
    with ControlClient(endpoint, timeout_s=10) as client:
        for _ in range(20):
            client.send(short(100, 200))
        for _ in range(2_000):
            client.send(SetKnobs(changes={"max_num_seqs": 64}, expected_version=-1, who="flood"))
        client.receive(1.0)
    subscriber.close()


def main() -> int:
    given = parser(__doc__, requests=3_600, warm_up=1_200).parse_args()
    levels_mb: list[float] = []
    options = ("--kv-memory", "64MB", "--replay-memory", "32MB", "--replay-steps", "2000")
    with serving(*options) as engine, ControlClient(engine.endpoint) as client:
        process, info = psutil.Process(engine.process.pid), client.info()
        named = f"KV pool 64, weights {info.weight_bytes / 2**20:.0f}, ring at most 32"
        print(f"start: {process.memory_info().rss / 2**20:.0f} MB ({named})", flush=True)
        for first in range(0, given.warm_up + given.requests, A_ROUND):
            began_s = time.monotonic()
            serve(client)
            rate = A_ROUND / (time.monotonic() - began_s)
            make_trouble(engine.endpoint, info.telemetry_endpoint)
            level_mb = process.memory_info().rss / 2**20
            print(f"{first + A_ROUND:>6} requests: {level_mb:.0f} MB  {rate:5.1f}/s", flush=True)
            if first >= given.warm_up:
                levels_mb.append(level_mb)
    most_mb = max(levels_mb)
    growth = most_mb / levels_mb[0] - 1
    print(f"after the warm-up: {levels_mb[0]:.0f} MB, at most {most_mb:.0f} MB: {growth:+.1%}")
    return 0 if growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
