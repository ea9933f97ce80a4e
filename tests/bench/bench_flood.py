"""What a flood on the control socket costs: step rate, and how long a good client waits.

The simulated engine decodes for 32 requests in steps of about 2 ms, behind keys. Turns of a few
seconds alternate: 16 clients with viewers' keys (for `stale` an operator's) flood a socket that
ignores what comes (the placebo, which costs the same processor time), then the engine. In all of
them an operator asks for the engine's info every 50 ms and keeps 32 requests in the engine.

Ends with 1 where a flood of viewers or strangers takes more than 5 % of the steps, or makes the
operator wait for more than half a second.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import commands
from stepscope.engine.protocol.commands import (
    GetAudit,
    GetInfo,
    GetSnapshot,
    ReplayFrom,
    Resume,
    SetKnobs,
    Submit,
)
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import (
    Credentials,
    KeyFolder,
    KeyPair,
    read_credentials,
    write_credentials,
)
from tests.support.ports import free_port

ENGINE = Path(__file__).parents[1] / "support" / "engines" / "simulated_engine.py"
FLOODER = Path(__file__).with_name("flooder.py")
NUM_CLIENTS = 16
MOST_LOST, MOST_WAIT_S = 0.05, 0.5


class Flood(NamedTuple):
    payload: bytes
    rate: float = 4_000.0  # messages or connections a second, of all clients
    kind: str = "viewer"  # of key
    # Of half a megabyte ("huge"), an abort of each request that it made ("aborts"), over repeatedly
    # opened connections ("anew"), or connections only.
    how: str = "messages"


SUBMIT = Submit(prompt_token_ids=[1] * 20, sampling=SamplingParams(max_tokens=500))
# ZMTP 3.1 with CURVE; the client's next message never arrives.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
STALE = SetKnobs(changes={"max_num_seqs": 64}, expected_version=-1, who="flooder")
FLOODS = {
    "info": Flood(commands.encode(GetInfo())),
    "snapshot": Flood(commands.encode(GetSnapshot())),
    "replay": Flood(commands.encode(ReplayFrom(sequence=0, limit=10_000))),
    "audit": Flood(commands.encode(GetAudit())),
    "change": Flood(commands.encode(Resume())),
    "submit": Flood(commands.encode(Submit(prompt_token_ids=[1] * 20))),
    "garbage": Flood(b"\xc1" * 40),
    "stale": Flood(commands.encode(STALE), kind="operator"),
    "huge": Flood(b"\xc1" * 40, rate=100.0, how="huge"),
    "aborts": Flood(commands.encode(SUBMIT), kind="operator", how="aborts"),
    "stranger": Flood(commands.encode(GetInfo()), kind="stranger", how="anew"),
    "connect": Flood(b"", rate=1_000.0, kind="stranger", how="connections"),
    "greeting": Flood(GREETING, rate=200.0, kind="stranger", how="connections"),
}
# Connections that stop after so many bytes; the oldest of 4,000 is closed, without any at once.
CONNECTIONS = """
import collections, contextlib, socket, sys, time
address, first_words, rate = sys.argv[1], bytes.fromhex(sys.argv[2]), float(sys.argv[3])
host, _, port = address.removeprefix("tcp://").rpartition(":")
most_open = 4_000 if first_words else 0
opened, number, begin_s = collections.deque(), 0, time.monotonic()
while True:
    time.sleep(0.01)
    due = int((time.monotonic() - begin_s) * rate)
    while number < due:
        number += 1
        with contextlib.suppress(OSError):
            opened.append(socket.create_connection((host, int(port)), timeout=1))
            opened[-1].sendall(first_words)
        while len(opened) > most_open:
            opened.popleft().close()
"""
PLACEBO = """
import sys, zmq
from pathlib import Path
from stepscope.engine.transport.keys import KeyFolder
from stepscope.engine.transport.gate import Gate
from stepscope.engine.transport.sockets import bind, server_socket
socket = server_socket(zmq.ROUTER, Gate(KeyFolder(Path(sys.argv[2]))))
bind(socket, sys.argv[1])
while True:
    socket.recv(copy=False)
"""


class Keys:
    """An engine's keys and those of its clients, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authorised = KeyFolder(folder / "authorised")
        viewers = [f"viewer-{number}" for number in range(NUM_CLIENTS)]
        for name in viewers:
            self.authorised.add(name, "viewer", self.of(name), None)
        for name in ("operator", "good"):
            self.authorised.add(name, "operator", self.of(name), None)
        server = self.authorised.server_pair().public
        for number in range(NUM_CLIENTS):
            name = f"stranger-{number}"
            write_credentials(self.of(name), Credentials(KeyPair.new(), server, name), "viewer")

    def of(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def of_kind(self, kind: str) -> list[Path]:
        if kind == "operator":
            return [self.of("operator")] * NUM_CLIENTS
        return [self.of(f"{kind}-{number}") for number in range(NUM_CLIENTS)]


def keep_busy(client: ControlClient, stop: threading.Event) -> None:
    """Keep 32 requests in the engine."""
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    open_requests = 0
    while not stop.is_set():
        while open_requests < 32:
            client.send(Submit(prompt_token_ids=[1] * 20, sampling=sampling, stream=False))
            open_requests += 1
        received = client.receive(0.05)
        if received is not None and type(received[1]).__name__ in ("Output", "Error"):
            open_requests -= 1


class Measured(NamedTuple):
    """One turn."""

    steps_per_s: float
    waits_s: list[float]  # of the operator


def turn(good: Endpoint, flooded: str, flood: Flood, keys: list[Path], seconds: float) -> Measured:
    """Measure the engine while `flooded` is flooded."""
    arguments = [flooded, flood.payload.hex(), str(flood.rate), flood.how, *map(str, keys)]
    script = ["-c", CONNECTIONS] if flood.how == "connections" else [str(FLOODER)]
    flooder = subprocess.Popen([sys.executable, *script, *arguments])
    try:
        time.sleep(1.5)  # until the allowed burst is used up
        waits_s = []
        with ControlClient(good, timeout_s=5) as operator:
            operator.info()
            first, start_s = operator.snapshot(), time.monotonic()
            while time.monotonic() - start_s < seconds:
                asked_s = time.monotonic()
                operator.info()
                waits_s.append(time.monotonic() - asked_s)
                time.sleep(0.05)
            last, end_s = operator.snapshot(), time.monotonic()
    finally:
        flooder.kill()
        flooder.wait()
    return Measured((last.step - first.step) / (end_s - start_s), waits_s)


def measured(name: str, turns: list[tuple[Measured, Measured]]) -> bool:
    """Print the cost of a flood; return whether it is within the limits."""
    flood = FLOODS[name]
    placebo = statistics.median(each[0].steps_per_s for each in turns)
    here = statistics.median(each[1].steps_per_s for each in turns)
    ratio = statistics.median(b.steps_per_s / a.steps_per_s for a, b in turns)
    wait_s = max(max(each[1].waits_s) for each in turns)
    median_s = statistics.median(w for each in turns for w in each[1].waits_s)
    is_good = flood.kind == "operator" or (ratio >= 1 - MOST_LOST and wait_s <= MOST_WAIT_S)
    print(
        f"{name:<9} {flood.kind:<9} {placebo:>9.1f} {here:>9.1f} {ratio - 1:>+8.1%}"
        f" {median_s * 1e3:>9.1f} {wait_s * 1e3:>8.1f}  {'' if is_good else 'TOO MUCH'}",
        flush=True,
    )
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--floods", nargs="*", choices=FLOODS, default=list(FLOODS))
    args = parser.parse_args()
    is_good = True
    with tempfile.TemporaryDirectory(prefix="flood-") as scratch:
        folder = Path(scratch)
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CONFIG_HOME"] = scratch
        keys = Keys(folder)
        address, elsewhere = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        good = Endpoint(address, read_credentials(keys.of("good")))
        started = [
            [str(ENGINE), address, str(keys.authorised.path)],
            ["-c", PLACEBO, elsewhere, str(keys.authorised.path)],
        ]
        engines = [subprocess.Popen([sys.executable, *each]) for each in started]
        stop = threading.Event()
        worker = ControlClient(good)
        thread = threading.Thread(target=keep_busy, args=(worker, stop))
        thread.start()
        print("flood     key         placebo      here     lost  wait ms      max")
        try:
            with ControlClient(good, timeout_s=30) as client:
                client.info()
            for name in args.floods:
                flood = FLOODS[name]
                paths = keys.of_kind(flood.kind)
                turns = [
                    (
                        turn(good, elsewhere, flood, paths, args.seconds),
                        turn(good, address, flood, paths, args.seconds),
                    )
                    for _ in range(args.pairs)
                ]
                is_good &= measured(name, turns)
        finally:
            stop.set()
            thread.join()
            worker.close()
            for engine in engines:
                engine.kill()
                engine.wait()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
