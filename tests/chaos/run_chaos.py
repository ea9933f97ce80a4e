"""Engine, three subscribers and a recorder behind a proxy that cuts, delays, stalls and refuses.

Now and then 16 clients flood the engine's control socket beside them. One subscriber is slow, one
is stopped and continued, one reconnects; the engine is killed and another takes its place.
Afterwards what each of them got is held against what the engine had sent: every message was
received, or is in a gap that is shown, exactly; nothing is in a gap that the engine could still
have replayed when it was asked; the recorder's files hold what it received.

    make chaos ARGS="--seconds 300 --seed 7"

The seed decides what is done to whom; what is asserted holds whatever happens. Ends with 1 and
says what is wrong.
"""

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from judge import Client, Engine, Wrong, check_observer, check_recorder
from proxy import FAULTS, Proxies

sys.path.insert(0, str(Path(__file__).parents[2]))

from stepscope.engine.client.client import ControlClient, EngineUnreachable
from stepscope.engine.protocol import commands
from stepscope.engine.protocol.commands import GetAudit, GetInfo, GetSnapshot, ReplayFrom, SetKnobs
from tests.support.ports import free_port

HERE = Path(__file__).parent
WAIT_S = 60.0
FLOOD_S = 1.5
CLIENTS = ("slow", "stopped", "reconnecting", "recorder")
SLOW_MS = "4"
NUM_ENGINES = 2  # one after another
RING = 600  # messages that an engine keeps
FLOODS = (  # none of which takes effect
    b"\xc1" * 40,
    commands.encode(GetInfo()),
    commands.encode(GetAudit()),
    commands.encode(GetSnapshot()),
    commands.encode(ReplayFrom(sequence=0, limit=10_000)),
    commands.encode(SetKnobs(changes={"max_num_seqs": 0}, who="flooder")),
    commands.encode(SetKnobs(changes={"max_num_seqs": 8}, expected_version=-1, who="flooder")),
)


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise Wrong(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.02)


class Chaos:
    """One run, as a context manager that ends all its processes."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.rng = random.Random(args.seed)
        self.engines: list[Engine] = []
        self.clients: dict[str, Client] = {}
        self.port = free_port()
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._proxies = Proxies()
        self._kinds = FAULTS if args.seconds > 30 else FAULTS[:-1]  # no time for stalls
        self._counts: Counter[str] = Counter()  # of faults

    def __enter__(self) -> "Chaos":
        self._proxies.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self._proxies.__exit__()

    def give_up(self) -> None:
        """End the run after a deadlock: say where all threads are, and end all processes."""
        faulthandler.dump_traceback()
        print(f"seed {self.args.seed}: no end; {self._said()[-2000:]}", file=sys.stderr)
        for process in self._processes:
            process.kill()
        os._exit(1)

    def _said(self) -> str:
        """What all processes have written to stderr."""
        return (self.folder / "stderr").read_text()

    def _start(self, script: str, *arguments: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, HERE / script, *arguments],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "stderr").open("ab"),
        )
        self._processes.append(process)
        return process

    def start_engine(self) -> None:
        generation = len(self.engines)
        truth = self.folder / f"truth-{generation}"
        truth.touch()
        seed = self.args.seed * 1000 + generation
        endpoint = f"tcp://127.0.0.1:{self.port}"
        process = self._start("engine.py", endpoint, str(truth), str(seed), str(RING))
        self.engines.append(Engine(f"simulated-{seed}", truth, process))

        def answers() -> bool:
            if process.poll() is not None:
                raise Wrong(f"the engine ended: {self._said()}")
            try:
                with ControlClient(endpoint, timeout_s=0.2) as client:
                    return client.info().engine_id == f"simulated-{seed}"
            except EngineUnreachable:
                return False

        wait_for("the engine answers", answers)

    def start_clients(self) -> None:
        for name in CLIENTS:
            proxy = self._proxies.open(self.port, free_port())
            log = self.folder / f"{name}.log"
            log.touch()
            arguments = ["observe", proxy.endpoint, *([SLOW_MS] if name == "slow" else [])]
            if name == "recorder":
                arguments = ["record", proxy.endpoint, "-o", str(self.folder / "session.mcap")]
                arguments += ["--rotate", "1GB"]
            process = self._start("clients.py", str(log), *arguments)
            self.clients[name] = Client(name, proxy, log, process)

    def wait_until_joined(self) -> None:
        """Wait until every client has received something of the newest engine."""
        for client in self.clients.values():
            line = f"join {self.engines[-1].name} "
            wait_for(f"{client.name} has joined", lambda c=client, line=line: c.has_noted(line))

    def fault(self) -> None:
        """Inject a random fault into the connections of one client."""
        kind, client = self.rng.choice(self._kinds), self.rng.choice(list(self.clients.values()))
        self._counts[kind] += 1
        self._proxies.do(client.proxy.fault(kind, self.rng))

    def make_trouble(self, seconds: float) -> None:
        """Inject random faults, and once stop a subscriber."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.stop_for_longer_than_the_ring()
            while time.monotonic() < end_s:
                self.fault()
                time.sleep(self.rng.uniform(0.05, 0.35))
                chance = self.rng.random()
                if chance < 0.05:
                    break
                if chance < 0.1:
                    self.flood()

    def stop_for_longer_than_the_ring(self) -> None:
        """Stop a subscriber for so long that the ring has lost what it missed."""
        self._counts["stop"] += 1
        client = self.clients["stopped"]
        client.process.send_signal(signal.SIGSTOP)
        self._proxies.do(client.proxy.cut())
        engine = self.engines[-1]
        enough = engine.last_sequence + RING + 200
        last, deadline_s = -1, 0.0
        while (now := engine.last_sequence) < enough:
            if now > last:
                last, deadline_s = now, time.monotonic() + WAIT_S
            if engine.process.poll() is not None or time.monotonic() > deadline_s:
                said = self._said()[-2000:]
                raise Wrong(f"the engine does not go on after message {now}: {said}")
            self.fault()
            time.sleep(self.rng.uniform(0.05, 0.2))
        client.process.send_signal(signal.SIGCONT)

    def flood(self) -> None:
        """Flood the engine beside all other faults."""
        self._counts["flood"] += 1
        payload = self.rng.choice(FLOODS).hex()
        arguments = (f"tcp://127.0.0.1:{self.port}", payload, "2000", "messages")
        flooder = self._start("../bench/flooder.py", *arguments)
        threading.Timer(FLOOD_S, flooder.kill).start()

    def kill_engine(self) -> None:
        self._counts["kill"] += 1
        engine = self.engines[-1]
        engine.process.kill()
        engine.process.wait()

    def end(self) -> None:
        """Let all processes catch up, and end them."""
        engine = self.engines[-1]
        self.clients["slow"].process.send_signal(signal.SIGUSR1)
        engine.process.send_signal(signal.SIGUSR1)
        for client in self.clients.values():
            self._proxies.do(client.proxy.delay(0, 0))
        last = -1

        def rests() -> bool:
            nonlocal last
            before, last = last, engine.last_sequence
            time.sleep(0.2)
            return last == before

        wait_for("the engine rests", rests)
        for client in self.clients.values():
            wait_for(f"{client.name} has caught up", lambda c=client: c.has_noted(f"got {last} "))
        for client in self.clients.values():
            number = signal.SIGINT if client.name == "recorder" else signal.SIGTERM
            client.process.send_signal(number)
        for process in (*(client.process for client in self.clients.values()), engine.process):
            if process is engine.process:  # not before all others have ended
                process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(WAIT_S)
            except subprocess.TimeoutExpired as error:
                raise Wrong(f"a process does not end: {error.cmd}") from error
            if code:
                raise Wrong(f"a process ended with {code}: {self._said()[-2000:]}")

    def check(self) -> dict[str, Any]:
        for engine in self.engines:
            engine.read_truth()
        report: dict[str, Any] = {
            "seed": self.args.seed,
            "faults": dict(self._counts),
            "cuts": sum(client.proxy.num_cut for client in self.clients.values()),
            "steps": sum(step >= 0 for e in self.engines for _, step, _ in e.sent.values()),
            "messages": sum(len(engine.sent) for engine in self.engines),
        }
        for name in ("slow", "stopped", "reconnecting"):
            report[name] = check_observer(self.clients[name], self.engines)
        report["recorder"] = check_recorder(self.clients["recorder"], self.engines, self.folder)
        return report


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with Chaos(args, folder) as chaos:
        timer = threading.Timer(10 * WAIT_S + 10 * args.seconds, chaos.give_up)
        timer.daemon = True
        timer.start()
        for generation in range(NUM_ENGINES):
            if generation:
                chaos.kill_engine()
            chaos.start_engine()
            if not generation:
                chaos.start_clients()
            chaos.wait_until_joined()
            chaos.make_trouble(args.seconds / NUM_ENGINES)
        chaos.end()
        timer.cancel()
        return chaos.check()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for logs and files, to look into them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        start_s = time.monotonic()
        try:
            report = run(args, folder)
        except Wrong as wrong:
            print(f"seed {args.seed}: {wrong}", file=sys.stderr)
            return 1
        report["seconds"] = round(time.monotonic() - start_s, 1)
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
