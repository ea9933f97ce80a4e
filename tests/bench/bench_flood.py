"""What a flood on the control socket costs: step rate and telemetry with and without one, paired.

The simulated engine decodes for 32 requests in steps of about 2 ms. Turns of a few seconds
alternate: quiet; with clients that send as fast as they can to another engine, which costs the same
processor time; and with the same clients on this engine. In all of them an operator asks for the
engine's info every 50 ms, and a subscriber counts what it misses. --unlimited shows what it would
be without limits.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from stepscope.engine.client.client import ControlClient
from stepscope.engine.client.errors import EngineUnreachable
from stepscope.engine.protocol import commands
from stepscope.engine.protocol.commands import GetInfo, GetSnapshot, Resume, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber

ENGINE = Path(__file__).parents[1] / "support" / "simulated_engine.py"
PAYLOADS = {
    "info": commands.encode(GetInfo()),
    "snapshot": commands.encode(GetSnapshot()),
    "change": commands.encode(Resume()),
    "garbage": b"\xc1" * 40,
}
FLOODER = """
import os, sys, zmq
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.sockets import client_socket
socket = client_socket(zmq.DEALER, Endpoint(sys.argv[1]))
socket.connect(sys.argv[1])
payload, number = bytes.fromhex(sys.argv[2]), 0
while True:
    number += 1
    socket.send_multipart([number.to_bytes(8, "big"), payload])
    while socket.poll(0):
        socket.recv_multipart()
"""


UNLIMITED = """
import runpy, sys
from stepscope.engine.transport import rate_limit
for name in ("CLIENT_RATE", "CLIENT_BURST", "TOTAL_RATE", "TOTAL_BURST"):
    setattr(rate_limit, name, 1e12)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def keep_busy(client: ControlClient, stop: threading.Event) -> None:
    """32 requests at any time."""
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    open_requests = 0
    while not stop.is_set():
        while open_requests < 32:
            client.send(Submit(prompt_token_ids=[1] * 20, sampling=sampling, stream=False))
            open_requests += 1
        received = client.receive(0.05)
        if received is not None and type(received[1]).__name__ == "Output":
            open_requests -= 1


def start(control: str, *, unlimited: bool) -> "subprocess.Popen[bytes]":
    if not unlimited:
        return subprocess.Popen([sys.executable, str(ENGINE), control])
    return subprocess.Popen([sys.executable, "-c", UNLIMITED, str(ENGINE), control])


def turn(
    endpoint: Endpoint, flooded: Endpoint | None, kind: str, num_flooders: int, seconds: float
) -> dict[str, float]:
    flooders = [
        subprocess.Popen([sys.executable, "-c", FLOODER, flooded.control, PAYLOADS[kind].hex()])
        for _ in range(num_flooders if flooded is not None else 0)
    ]
    time.sleep(0.7)
    waits_ms, num_late = [], 0
    with ControlClient(endpoint, timeout_s=5) as operator:
        first, start_s = operator.snapshot(), time.monotonic()
        while time.monotonic() - start_s < seconds:
            asked_s = time.monotonic()
            try:
                operator.info()
            except EngineUnreachable:
                num_late += 1
            waits_ms.append((time.monotonic() - asked_s) * 1000)
            time.sleep(0.05)
        last, end_s = operator.snapshot(), time.monotonic()
    for flooder in flooders:
        flooder.kill()
        flooder.wait()
    control = (last.control.limited if last.control else 0, last.control.bad if last.control else 0)
    before = (first.control.limited, first.control.bad) if first.control is not None else (0, 0)
    return {
        "steps/s": (last.step - first.step) / (end_s - start_s),
        "info p50 ms": statistics.median(waits_ms),
        "info max ms": max(waits_ms),
        "no answer": num_late,
        "limited/s": (control[0] - before[0]) / (end_s - start_s),
        "bad/s": (control[1] - before[1]) / (end_s - start_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--flooders", type=int, default=1)
    parser.add_argument("--unlimited", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flood-") as folder:
        endpoint = Endpoint.parse(f"{folder}/engine")
        other = Endpoint.parse(f"{folder}/other")
        engines = [start(e.control, unlimited=args.unlimited) for e in (endpoint, other)]
        time.sleep(2)
        subscriber = Subscriber(endpoint, History(max_steps=5_000))
        stop = threading.Event()
        worker = ControlClient(endpoint)
        thread = threading.Thread(target=keep_busy, args=(worker, stop))
        thread.start()
        subscriber.start()
        print(f"{'flood':<9} {'steps/s: quiet':>14} {'elsewhere':>9} {'here':>7}  here/elsewhere")
        try:
            for kind in PAYLOADS:
                turns = [
                    [
                        turn(endpoint, flooded, kind, args.flooders, args.seconds)
                        for flooded in (None, other, endpoint)
                    ]
                    for _ in range(args.pairs)
                ]
                quiet, elsewhere, here = (
                    statistics.median(each[n]["steps/s"] for each in turns) for n in range(3)
                )
                ratio = statistics.median(t[2]["steps/s"] / t[1]["steps/s"] for t in turns)
                rest = {
                    name: statistics.median(each[2][name] for each in turns)
                    for name in turns[0][2]
                    if name != "steps/s"
                }
                told = ", ".join(f"{name} {value:,.1f}" for name, value in rest.items())
                figures = f"{quiet:>14.1f} {elsewhere:>9.1f} {here:>7.1f} {ratio:>15.3f}"
                print(f"{kind:<9} {figures}  {told}", flush=True)
        finally:
            stop.set()
            thread.join()
            subscriber.stop()
            worker.close()
            for engine in engines:
                engine.kill()
                engine.wait()
        history = subscriber.history
        print(f"telemetry: {history.num_lost} messages lost, {subscriber.num_healed} healed")


if __name__ == "__main__":
    main()
