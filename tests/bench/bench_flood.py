"""What a flood on the control socket costs: step rate, and how long a good client waits.

The simulated engine decodes for 32 requests in steps of about 2 ms, behind keys. Turns of a few
seconds alternate: 16 clients with viewers' keys (for `stale` an operator's) flood a socket that
ignores what comes (the placebo, which costs the same processor time), or the engine. In all of
them an operator asks for the engine's info every 50 ms and keeps 32 requests in the engine.

Ends with 1 where a flood of viewers or strangers takes more than 5 % of the steps, or makes the
operator wait for more than half a second.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import parser, turns

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import commands
from stepscope.engine.protocol.commands import Command, Submit
from stepscope.engine.protocol.replies import Error, Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import (
    Credentials,
    KeyFolder,
    KeyPair,
    read_credentials,
    write_credentials,
)
from tests.support.engines.engine_process import PROGRAM
from tests.support.ports import free_port

FLOODER = Path(__file__).with_name("flooder.py")
NUM_CLIENTS, NUM_REQUESTS = 16, 32
MOST_LOST, MOST_WAIT_S = 0.05, 0.5


class Flood(NamedTuple):
    what: Command | bytes
    kind: str = "viewer"  # of key
    rate: float = 4_000.0  # messages or connections a second, of all clients
    # Of half a megabyte ("huge"), an abort of each request that it made ("aborts"), over repeatedly
    # opened connections ("anew"), or connections only.
    how: str = "messages"


# ZMTP 3.1 with CURVE; the client's next message never arrives.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
STALE = commands.SetKnobs(changes={"max_num_seqs": 64}, expected_version=-1, who="flooder")
LONG = Submit(prompt_token_ids=[1] * 20, sampling=SamplingParams(max_tokens=500))
FLOODS = {
    "info": Flood(commands.GetInfo()),
    "snapshot": Flood(commands.GetSnapshot()),
    "replay": Flood(commands.ReplayFrom(sequence=0, limit=10_000)),
    "audit": Flood(commands.GetAudit()),
    "change": Flood(commands.Resume()),
    "submit": Flood(Submit(prompt_token_ids=[1] * 20)),
    "garbage": Flood(b"\xc1" * 40),
    "stale": Flood(STALE, "operator"),
    "huge": Flood(b"\xc1" * 40, rate=100.0, how="huge"),
    "aborts": Flood(LONG, "operator", how="aborts"),
    "stranger": Flood(commands.GetInfo(), "stranger", how="anew"),
    "connect": Flood(b"", "stranger", 1_000.0, "connections"),
    "greeting": Flood(GREETING, "stranger", 200.0, "connections"),
}
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


def write_keys(folder: Path) -> tuple[KeyFolder, dict[str, list[Path]]]:
    """Make an engine's keys, and those of its clients by kind."""
    authorised = KeyFolder(folder / "authorised")
    kinds: dict[str, list[Path]] = {"operator": [folder / "operator.key"] * NUM_CLIENTS}
    for kind in ("viewer", "stranger"):
        kinds[kind] = [folder / f"{kind}-{number}.key" for number in range(NUM_CLIENTS)]
    for path, role in (
        *((path, "viewer") for path in kinds["viewer"]),
        *((folder / f"{name}.key", "operator") for name in ("operator", "good")),
    ):
        authorised.add(path.stem, role, path, None)
    server = authorised.server_pair().public
    for path in kinds["stranger"]:
        write_credentials(path, Credentials(KeyPair.new(), server, path.stem), "viewer")
    return authorised, kinds


def keep_busy(endpoint: Endpoint, stop: threading.Event) -> None:
    """Keep requests in the engine."""
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    num_open = 0
    with ControlClient(endpoint) as client:
        while not stop.is_set():
            while num_open < NUM_REQUESTS:
                client.send(Submit(prompt_token_ids=[1] * 20, sampling=sampling, stream=False))
                num_open += 1
            received = client.receive(0.05)
            num_open -= received is not None and isinstance(received[1], Output | Error)


class Measured(NamedTuple):
    steps_per_s: float
    waits_s: list[float]  # of the operator


def turn(good: Endpoint, flooded: str, flood: Flood, keys: list[Path], seconds: float) -> Measured:
    """Measure the engine while `flooded` is flooded."""
    payload = flood.what if isinstance(flood.what, bytes) else commands.encode(flood.what)
    words = (FLOODER, flooded, payload.hex(), str(flood.rate), flood.how, *keys)
    flooder = subprocess.Popen([sys.executable, *words])
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


def is_harmless(name: str, placebo: list[Measured], here: list[Measured]) -> bool:
    """Print what a flood cost; whether it is little."""
    kind = FLOODS[name].kind
    rates = [statistics.median(each.steps_per_s for each in of) for of in (placebo, here)]
    ratio = statistics.median(
        b.steps_per_s / a.steps_per_s for a, b in zip(placebo, here, strict=True)
    )
    waits_s = [wait_s for each in here for wait_s in each.waits_s]
    is_good = kind == "operator" or (ratio >= 1 - MOST_LOST and max(waits_s) <= MOST_WAIT_S)
    print(
        f"{name:<9} {kind:<9} {rates[0]:>9.1f} {rates[1]:>9.1f} {ratio - 1:>+8.1%}"
        f" {statistics.median(waits_s) * 1e3:>9.1f} {max(waits_s) * 1e3:>8.1f}"
        f"  {'' if is_good else 'TOO MUCH'}",
        flush=True,
    )
    return is_good


def main() -> int:
    given = parser(__doc__, seconds=3.0, pairs=3, floods=tuple(FLOODS)).parse_args()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="flood-"))
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CONFIG_HOME"] = scratch
        authorised, keys = write_keys(Path(scratch))
        address, elsewhere = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        good = Endpoint(address, read_credentials(Path(scratch) / "good.key"))
        for words in ([str(PROGRAM), address], ["-c", PLACEBO, elsewhere]):
            engine = subprocess.Popen([sys.executable, *words, str(authorised.path)])
            stack.callback(engine.wait)
            stack.callback(engine.kill)
        stop = threading.Event()
        worker = threading.Thread(target=keep_busy, args=(good, stop))
        worker.start()
        stack.callback(worker.join)
        stack.callback(stop.set)
        with ControlClient(good, timeout_s=30) as client:
            client.info()
        print("flood     key         placebo      here     lost  wait ms      max")
        is_good = True
        for name in given.floods:
            flood = FLOODS[name]
            arms = {
                place: partial(turn, good, place, flood, keys[flood.kind], given.seconds)
                for place in (elsewhere, address)
            }
            is_good &= is_harmless(name, *turns(arms, given.pairs).values())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
