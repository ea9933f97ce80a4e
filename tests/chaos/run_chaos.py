"""Engine, three subscribers and a recorder behind a proxy that cuts, delays, stalls and refuses.

One subscriber is slow, one is stopped and continued, one reconnects; the engine is killed and
another takes its place. Afterwards what each of them got is held against what the engine had sent:
every message was received, or is in a gap that is shown, exactly; nothing is in a gap that the
engine could still have replayed when it was asked; the recorder's files hold what it received.

    make chaos ARGS="--seconds 300 --seed 7"

The seed decides what is done to whom; what is asserted holds whatever happens. Ends with 1 and
says what is wrong.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy import Proxies, Proxy

from stepscope.engine.client import ControlClient, EngineUnreachable
from stepscope.recordings.reader import Recording
from stepscope.recordings.verify import verify

HERE = Path(__file__).parent
WAIT_S = 60.0
CLIENTS = ("slow", "stopped", "reconnecting", "recorder")
SLOW_MS = 4.0
STALL_S = 7.0  # longer than a connection may be silent


class Wrong(Exception):  # noqa: N818
    """What the run has shown to be wrong."""


@dataclass
class Engine:
    """One generation of it."""

    name: str
    truth: Path
    process: "subprocess.Popen[bytes]"
    sent: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # topic, step, checksum

    @property
    def last_sequence(self) -> int:
        with self.truth.open("rb") as file:
            file.seek(max(0, self.truth.stat().st_size - 200))
            lines = file.read().split(b"\n")
        return int(lines[-2].split()[0]) if len(lines) > 1 else -1

    def read_truth(self) -> None:
        for line in self.truth.read_text().splitlines():
            words = line.split()
            if len(words) == 4:  # the last one may be cut
                self.sent[int(words[0])] = (words[1], int(words[2]), int(words[3]))


@dataclass
class Client:
    """Someone who listens, and the proxy that it listens through."""

    name: str
    proxy: Proxy
    log: Path
    process: "subprocess.Popen[bytes]"

    def log_lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def has_got(self, sequence: int) -> bool:
        tail = self.log_lines()[-3000:]
        return any(line.startswith(f"got {sequence} ") for line in tail)


def free_ports() -> int:
    """The first of two neighbouring ports that nobody has."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return int(port)


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise Wrong(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.02)


class Chaos:
    """One run. A context manager: nothing is left of it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.rng = random.Random(args.seed)
        self.faults: Counter[str] = Counter()
        self.engines: list[Engine] = []
        self.clients: dict[str, Client] = {}
        self.port = free_ports()
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._proxies = Proxies()

    def __enter__(self) -> "Chaos":
        self._proxies.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._say_where_they_are()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        self._proxies.__exit__()

    def _say_where_they_are(self) -> None:
        """Of observers that still run: where each of their threads is."""
        for client in self.clients.values():
            if client.name != "recorder" and client.process.poll() is None:
                print(f"{client.name} (pid {client.process.pid}) still runs", file=sys.stderr)
                client.process.send_signal(signal.SIGCONT)
                client.process.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
        said = (self.folder / "stderr").read_text().splitlines()
        lines = [line for line in said if not line.startswith("recording ")]
        print("\n".join(lines[-80:]), file=sys.stderr)

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, *arguments],
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
        process = self._start(
            str(HERE / "engine.py"),
            *(endpoint, str(truth), "--seed", str(seed), "--ring", str(self.args.ring)),
        )
        self.engines.append(Engine(f"simulated-{seed}", truth, process))

        def answers() -> bool:
            if process.poll() is not None:
                raise Wrong(f"the engine ended: {(self.folder / 'stderr').read_text()}")
            try:
                with ControlClient(endpoint, timeout_s=0.2) as client:
                    return client.info().engine_id == f"simulated-{seed}"
            except EngineUnreachable:
                return False

        wait_for("the engine answers", answers)

    def start_clients(self) -> None:
        for name in CLIENTS:
            proxy = self._proxies.open(self.port, free_ports())
            log = self.folder / f"{name}.log"
            log.touch()
            if name == "recorder":
                arguments = ["recorder.py", str(log), "record", proxy.endpoint]
                arguments += ["-o", str(self.folder / "session.mcap"), "--rotate", "1GB"]
            else:
                arguments = ["observer.py", proxy.endpoint, str(log)]
                arguments += ["--slow-ms", str(SLOW_MS)] if name == "slow" else []
            process = self._start(str(HERE / arguments[0]), *arguments[1:])
            self.clients[name] = Client(name, proxy, log, process)

    def wait_until_joined(self) -> None:
        """All have something of the newest engine."""
        for client in self.clients.values():
            wait_for(f"{client.name} has joined", lambda c=client: self._has_joined(c))

    def _has_joined(self, client: Client) -> bool:
        line = f"join {self.engines[-1].name} "
        return any(each.startswith(line) for each in client.log_lines())

    # What is done to them

    def make_trouble(self, seconds: float) -> None:
        """Faults by chance, and once the one that is stopped."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.stop_for_longer_than_the_ring()
            while time.monotonic() < end_s:
                self.one_fault()
                time.sleep(self.rng.uniform(0.05, 0.35))
                if self.rng.random() < 0.05:
                    break

    def one_fault(self) -> None:
        rng = self.rng
        client = self.clients[rng.choice(CLIENTS)]
        kinds = ["cut", "cut telemetry", "cut control", "delay", "refuse"]
        if self.args.seconds > 30:
            kinds.append("stall")
        kind = rng.choice(kinds)
        self.faults[kind] += 1
        proxy = client.proxy
        if kind == "cut":
            self._proxies.do(proxy.cut())
        elif kind == "cut telemetry":
            self._proxies.do(proxy.cut(control=False))
        elif kind == "cut control":
            self._proxies.do(proxy.cut(telemetry=False))
        elif kind == "delay":
            self._proxies.do(proxy.delay(rng.uniform(0, 0.03), rng.uniform(0, 0.03)))
        elif kind == "refuse":
            self._proxies.do(proxy.refuse(rng.uniform(0.05, 0.4)))
        else:
            self._proxies.do(proxy.stall(STALL_S))

    def stop_for_longer_than_the_ring(self) -> None:
        """So that it must lose some: what it had missed is not in the ring any more."""
        self.faults["stop"] += 1
        client = self.clients["stopped"]
        client.process.send_signal(signal.SIGSTOP)
        self._proxies.do(client.proxy.cut())
        engine = self.engines[-1]
        enough = engine.last_sequence + self.args.ring + 200
        while engine.last_sequence < enough:
            self.one_fault()
            time.sleep(self.rng.uniform(0.05, 0.2))
        client.process.send_signal(signal.SIGCONT)

    def kill_engine(self) -> None:
        self.faults["kill"] += 1
        engine = self.engines[-1]
        engine.process.kill()
        engine.process.wait()

    def end(self) -> None:
        """Let all catch up, and end them."""
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
            wait_for(f"{client.name} has caught up", lambda c=client: c.has_got(last))
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
                said = (self.folder / "stderr").read_text()[-2000:]
                raise Wrong(f"a process ended with {process.returncode}: {said}")

    # What they say of it

    def check(self) -> dict[str, Any]:
        for engine in self.engines:
            engine.read_truth()
        report: dict[str, Any] = {
            "seed": self.args.seed,
            "faults": dict(self.faults),
            "cuts": sum(client.proxy.num_cut for client in self.clients.values()),
            "steps": sum(step >= 0 for e in self.engines for _, step, _ in e.sent.values()),
            "messages": sum(len(engine.sent) for engine in self.engines),
        }
        for name in ("slow", "stopped", "reconnecting"):
            report[name] = check_observer(self.clients[name], self.engines)
        report["recorder"] = check_recorder(self.clients["recorder"], self.engines, self.folder)
        return report


def check_observer(client: Client, engines: list[Engine]) -> dict[str, int]:
    """Hold what an observer has written down against the truth; gives its figures."""
    told = Counter[str]()
    by_name = {engine.name: engine for engine in engines}
    got: dict[str, dict[int, tuple[str, int]]] = {}
    joined: dict[str, int] = {}
    replays: dict[str, dict[int, int]] = {}
    now = ""
    asked: dict[int, int] = {}  # before the first message of an engine is known
    sessions: dict[str, dict[str, Any]] = {}
    for line in client.log_lines():
        words = line.split(maxsplit=1)
        if words[0] == "join":
            now, sequence = words[1].split()[0], int(words[1].split()[1])
            told["joins"] += 1
            joined.setdefault(now, sequence)
            got.setdefault(now, {})
        elif words[0] == "replay":
            asked = replays.setdefault(now, {})
            first, oldest = map(int, words[1].split())
            asked[first] = max(oldest, asked.get(first, 0))
        elif words[0] == "got":
            number, topic, checksum = words[1].split()
            mine = got[now]
            if mine and int(number) <= next(reversed(mine)):
                raise Wrong(f"{client.name} got {number} after {next(reversed(mine))}")
            mine[int(number)] = topic, int(checksum)
        elif words[0] == "session":
            session = json.loads(words[1])
            sessions[session["engine"]] = session
    if set(joined) != set(by_name):
        raise Wrong(f"{client.name} joined {sorted(joined)}, there were {sorted(by_name)}")
    for name, engine in by_name.items():
        session, mine = sessions[name], got[name]
        who = f"{client.name} of {name}"
        for sequence, (topic, checksum) in mine.items():
            if engine.sent.get(sequence, ("", 0, 0))[::2] != (topic, checksum):
                raise Wrong(f"{who}: message {sequence} is not what was sent")
        expected = range(joined[name] + 1, session["last_sequence"] + 1)
        missing = [number for number in expected if number not in mine]
        shown = [n for first, last, *_ in session["gaps"] for n in range(first, last + 1)]
        if shown != missing or session["num_lost"] != len(missing):
            raise Wrong(
                f"{who}: {len(missing)} messages missing, {len(shown)} in gaps, "
                f"{session['num_lost']} counted"
            )
        check_steps(who, engine, session, mine, missing)
        check_heard(who, missing, replays.get(name, {}))
        if session["num_bad"]:
            raise Wrong(f"{who}: {session['num_bad']} messages could not be read")
        told["received"] += len(mine)
        told["lost"] += len(missing)
        told["gaps"] += len(session["gaps"])
        told["healed"] = session["num_healed"]
    last = sessions[engines[-1].name]
    if (last["status"], last["error"], last["needs_snapshot"]) != ("live", None, False):
        raise Wrong(f"{client.name} ends {last['status']}: {last['error']}")
    return dict(told)


def check_steps(
    who: str,
    engine: Engine,
    session: dict[str, Any],
    mine: dict[int, tuple[str, int]],
    missing: list[int],
) -> None:
    """The history holds the steps that came, and shows a gap around each that did not."""
    steps = [engine.sent[number][1] for number in mine if engine.sent[number][1] >= 0]
    if steps != session["steps"]:
        raise Wrong(f"{who}: {len(steps)} steps came, {len(session['steps'])} are kept")
    for number in missing:
        step = engine.sent[number][1]
        if step >= 0 and not any(
            after < step and (before is None or step < before)
            for _, _, after, before in session["gaps"]
        ):
            raise Wrong(f"{who}: step {step} is lost and no gap shows it")


def check_heard(who: str, missing: list[int], replays: dict[int, int]) -> None:
    """Each run of lost messages was asked for, and was not in the ring any more."""
    first: int | None = None
    for place, number in enumerate(missing):
        first = number if first is None else first
        if place + 1 < len(missing) and missing[place + 1] == number + 1:
            continue
        oldest = replays.get(first)
        if oldest is None:
            raise Wrong(f"{who}: messages {first} to {number} were never asked for")
        if oldest <= number:
            raise Wrong(f"{who}: {first} to {number} are lost, the engine still had {oldest}")
        first = None


def check_recorder(client: Client, engines: list[Engine], folder: Path) -> dict[str, int]:
    """Hold the recorder's files against the truth; gives its figures."""
    told = Counter[str]()
    now = ""
    received: list[dict[int, str]] = []
    replays_of: list[dict[int, int]] = []
    for line in client.log_lines():
        words = line.split()
        if words[0] == "replay":
            first, oldest = int(words[1]), int(words[2])
            replays_of[-1][first] = max(oldest, replays_of[-1].get(first, 0))
        elif words[0] == "join" and words[1] != now:
            now = words[1]
            received.append({})
            replays_of.append({})
        elif words[0] == "got":
            received[-1][int(words[1])] = words[2]
    files = sorted(folder.glob("session-*.mcap"))
    if len(files) != len(engines):
        raise Wrong(f"{len(files)} files of {len(engines)} engines: {[f.name for f in files]}")
    for path, engine, mine, asked in zip(files, engines, received, replays_of, strict=True):
        report = verify(path, lambda share: None)
        bad = [check.name for check in report.checks if not check.is_good]
        with Recording(path) as recording:
            if recording.info.engine_id != engine.name:
                raise Wrong(f"{path.name} is of {recording.info.engine_id}")
            frames = [frame for frame, _ in recording.frames() if frame.topic != b"keyframe"]
            begin = recording.chunk_frames(0)[0].sequence
        for frame in frames:
            sent = engine.sent.get(frame.sequence, ("", 0, 0))
            if sent[::2] != (frame.topic.decode(), zlib.crc32(frame.payload)):
                raise Wrong(f"{path.name}: message {frame.sequence} is not what was sent")
        held = [frame.sequence for frame in frames]
        if held != list(mine):
            raise Wrong(f"{path.name}: {len(held)} messages, {len(mine)} were received")
        missing = sorted(set(range(begin + 1, held[-1] + 1)) - set(held))
        check_heard(path.name, missing, asked)
        if report.num_lost_messages != len(missing):
            raise Wrong(f"{path.name}: {report.num_lost_messages} lost, {len(missing)} missing")
        if bad != (["sequence"] if missing else []):
            raise Wrong(f"{path.name} fails {bad}")
        told["received"] += len(held)
        told["lost"] += len(missing)
        told["steps"] += report.num_steps
        told["bytes"] += report.num_bytes
    return dict(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=2, help="one after another")
    parser.add_argument("--ring", type=int, default=1200, help="messages the engine keeps")
    parser.add_argument("--keep", type=Path, help="folder for logs and files, to look into them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        start_s = time.monotonic()
        try:
            with Chaos(args, folder) as chaos:
                for generation in range(args.engines):
                    chaos.start_engine()
                    if generation == 0:
                        chaos.start_clients()
                    chaos.wait_until_joined()
                    chaos.make_trouble(args.seconds / args.engines)
                    if generation + 1 < args.engines:
                        chaos.kill_engine()
                chaos.end()
                report = chaos.check()
        except Wrong as wrong:
            print(f"seed {args.seed}: {wrong}", file=sys.stderr)
            return 1
        report["seconds"] = round(time.monotonic() - start_s, 1)
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
