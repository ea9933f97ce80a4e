"""Malformed input against running engines: `fuzz_control.py --seconds 60` (or: make fuzz).

One engine behind ipc without keys, one behind TCP with keys, each a process of its own. Whatever
they are sent, every message that can be answered is answered once; knobs, queues, blocks and the
audit trail stay as they were; and afterwards they serve. Prints what was sent and what came back;
ends with 1, and with the seed that shows it again, if any of that is not so.
"""

import argparse
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from malformed import Malformer

from stepscope.engine.client.client import ControlClient, EngineUnreachable
from stepscope.engine.protocol import replies
from stepscope.engine.protocol.commands import GetAudit, Pause, Resume, Submit
from stepscope.engine.protocol.replies import AuditPage, Error, Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import KeyFolder
from stepscope.engine.transport.sockets import client_socket

ENGINE = Path(__file__).parents[1] / "support" / "engines" / "simulated_engine.py"
BATCH = 50
ANSWER_MS = 10_000
CHECK_S = 2.0


class Failure(Exception):  # noqa: N818 - ends the run
    """A check has failed."""


class Engine:
    """An engine process with ended requests, a changed knob and a pause: a state to preserve."""

    def __init__(self, endpoint: Endpoint, log: Path, keys: str = "") -> None:
        self.endpoint, self.log = endpoint, log
        self.process = subprocess.Popen(
            [sys.executable, ENGINE, endpoint.control, keys], stderr=log.open("wb")
        )
        deadline_s = time.monotonic() + 20
        while True:
            try:
                with ControlClient(endpoint, timeout_s=0.5) as client:
                    client.info()
                break
            except EngineUnreachable:
                if time.monotonic() > deadline_s or self.process.poll() is not None:
                    raise
                time.sleep(0.1)
        self.serve_one()
        with ControlClient(endpoint) as client:
            client.set_knobs({"max_num_seqs": 5}, who="before")
            client.ask(Pause(who="before"))
        self.before = self.state()

    def serve_one(self) -> None:
        """Raises Failure when a request is not answered to its end."""
        with ControlClient(self.endpoint, timeout_s=10) as client:
            client.ask(Resume(who="before"))
            sampling = SamplingParams(max_tokens=5, ignore_eos=True)
            client.send(Submit(prompt_token_ids=[5] * 50, sampling=sampling))
            while (received := client.receive(10)) is not None:
                if isinstance(received[1], Output) and received[1].finish_reason == "length":
                    return
        raise Failure(f"{self.endpoint.control} does not serve any more")

    def state(self) -> str:
        """A digest of all state that must not have changed."""
        if self.process.poll() is not None:
            raise Failure(f"the engine ended with {self.process.returncode}")
        with ControlClient(self.endpoint, timeout_s=20) as client:
            taken = client.snapshot()
            page = client.ask(GetAudit(limit=1_000))
            assert isinstance(page, AuditPage)
            kept = (
                *(taken.step, taken.state, taken.knobs, taken.knobs_version, taken.requests),
                *(taken.blocks, taken.kv, taken.workload, page.entries),
            )
        return hashlib.sha256(msgspec.msgpack.encode(kept)).hexdigest()

    def check(self) -> None:
        if self.state() != self.before:
            raise Failure(f"the state of {self.endpoint.control} has changed")

    def said(self) -> str:
        """The end of its standard error output."""
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def fuzz_messages(engine: Engine, malformer: Malformer, sent: Counter[str]) -> Counter[str]:
    """One connection, one batch; each message must have exactly one answer, with its own id."""
    dealer = client_socket(zmq.DEALER, engine.endpoint)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(engine.endpoint.control)
    expected: Counter[bytes] = Counter()
    answers: Counter[str] = Counter()
    try:
        for _ in range(BATCH):
            kind, frames = malformer.frames()
            dealer.send_multipart(frames)
            sent[kind] += 1
            expected[frames[0][:8].rjust(8, b"\0")] += 1
        for _ in range(BATCH):
            if not dealer.poll(ANSWER_MS):
                raise Failure(f"{sum(expected.values())} messages without an answer")
            answer_id, payload = dealer.recv_multipart()
            if not expected[answer_id]:
                raise Failure(f"an answer to {answer_id.hex()}, which was not asked")
            expected[answer_id] -= 1
            reply = replies.decode_reply(payload)
            answers[reply.code if isinstance(reply, Error) else type(reply).__name__] += 1
        if dealer.poll(0):
            raise Failure("more answers than messages")
    finally:
        dealer.close()
    return answers


def fuzz_keyless(engine: Engine, malformer: Malformer) -> None:
    """Send without a key to an engine that requires one: no reply may come back."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(engine.endpoint.control)
    with contextlib.suppress(zmq.Again):  # it was refused already
        dealer.send_multipart(malformer.frames()[1], zmq.NOBLOCK)
    if dealer.poll(30):
        raise Failure("a client without a key got an answer")
    dealer.close()


def run(seconds: float, seed: int, folder: Path) -> None:
    malformer = Malformer(seed)
    keys = folder / "keys"
    KeyFolder(keys).add("somebody", "viewer", folder / "somebody.key", None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    open_engine = Engine(Endpoint.parse(f"{folder}/open"), folder / "open.log")
    keyed_engine = Engine(
        Endpoint.parse(f"tcp://127.0.0.1:{port}"), folder / "keyed.log", str(keys)
    )
    sent: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    start_s = next_check_s = time.monotonic()
    try:
        while time.monotonic() - start_s < seconds:
            answers += fuzz_messages(open_engine, malformer, sent)
            answers += fuzz_messages(keyed_engine, malformer, sent)
            fuzz_keyless(keyed_engine, malformer)
            sent["keyless"] += 1
            if time.monotonic() >= next_check_s:
                next_check_s = time.monotonic() + CHECK_S
                open_engine.check()
                keyed_engine.check()
        for engine in (open_engine, keyed_engine):
            engine.check()
            engine.serve_one()
    except Exception:
        for engine in (open_engine, keyed_engine):
            print(f"{engine.endpoint.control} said:\n{engine.said()}", file=sys.stderr)
        raise
    finally:
        open_engine.stop()
        keyed_engine.stop()
    took_s = time.monotonic() - start_s
    print(f"{sent.total():,} inputs in {took_s:.0f} s, seed {seed}")
    print("sent    ", ", ".join(f"{kind} {count:,}" for kind, count in sent.most_common()))
    print("answered", ", ".join(f"{kind} {count:,}" for kind, count in answers.most_common()))
    print("state, knobs and audit are as they were, and both engines serve")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CONFIG_HOME"] = folder
        try:
            run(args.seconds, args.seed, Path(folder))
        except Failure as failure:
            print(f"FAILED with --seed {args.seed}: {failure}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
