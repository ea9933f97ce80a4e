"""What an engine's memory does over an hour of load, run as fast as it goes.

A real engine (the demo's model on this machine's CPU) with a KV pool of 64 MB serves as many short
requests as one a second makes in an hour; every few hundred of them a client vanishes amid its
requests, a subscriber joins and leaves, and a client floods the control socket. The first part
warms it up: the pages of the KV pool and of the telemetry ring are used for the first time.
Afterwards the engine's memory is to stay within 5 %; ends with 1 where it does not.

Shares are named: the KV pool, the weights, what the ring may take (--replay-memory), and the rest:
interpreter, torch and its buffers, heap.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from stepscope.engine.client.client import ControlClient, EngineUnreachable
from stepscope.engine.protocol.commands import SetKnobs, Submit
from stepscope.engine.protocol.replies import Error, Output
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineInfo

MOST_GROWTH = 0.05
NUM_AT_ONCE = 48
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def mappings_mb(pid: int) -> dict[str, float]:
    """Resident memory by kind: heap, arenas of other threads, large pieces, files."""
    found: dict[str, float] = {}
    name, size_kb = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            path = words[5] if len(words) > 5 else ""
            first, last = (int(each, 16) for each in words[0].split("-"))
            size_kb = (last - first) // 1024
            is_arena = not path and first % (64 << 20) == 0 and size_kb <= 65536
            large = "pieces of 64 MB and more" if size_kb >= 65536 else "other pieces"
            name = "arenas of threads" if is_arena else path or large
            name = "files" if name.startswith("/") else name
        elif words[0] == "Rss:":
            found[name] = found.get(name, 0.0) + int(words[1]) / 1024
    return found


def pool_mb(info: EngineInfo) -> float:
    per_token = 2 * info.num_layers * info.num_kv_heads * info.head_dim * BYTES[info.dtype]
    return per_token * info.block_size * info.num_blocks / 2**20


def serve(client: ControlClient, number: int) -> None:
    """Serve so many short requests, some at once, with the varied lengths of an hour of load."""
    lengths = itertools.cycle((5, 60, 17, 130, 33, 9, 250, 80))
    waiting = 0
    for _ in range(number):
        length = next(lengths)
        sampling = SamplingParams(max_tokens=4 + length % 13, ignore_eos=True)
        client.send(Submit(prompt_token_ids=list(range(1, length + 1)), sampling=sampling))
        waiting += 1
        while waiting >= NUM_AT_ONCE:
            waiting -= ends_one(client)
    while waiting:
        waiting -= ends_one(client)


def ends_one(client: ControlClient) -> bool:
    received = client.receive(30.0)
    if received is None:
        raise SystemExit("the engine is silent")
    reply = received[1]
    return isinstance(reply, Error) or (isinstance(reply, Output) and bool(reply.finish_reason))


def make_trouble(endpoint: str, telemetry: str) -> None:
    """Let a client vanish, a subscriber stop reading, and a client flood the engine."""
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.linger = 0
    subscriber.setsockopt(zmq.RCVHWM, 10)
    subscriber.connect(telemetry)
    subscriber.subscribe(b"")
    with ControlClient(endpoint, timeout_s=10) as client:
        for _ in range(20):
            sampling = SamplingParams(max_tokens=200, ignore_eos=True)
            client.send(Submit(prompt_token_ids=[1] * 100, sampling=sampling))
        for _ in range(2_000):
            client.send(SetKnobs(changes={"max_num_seqs": 64}, expected_version=-1, who="flood"))
        client.receive(1.0)
    subscriber.close()


def rounds(number: int) -> Iterator[tuple[int, int]]:
    """Yield the number of requests so far, and of those sent next."""
    size = 300
    for first in range(0, number, size):
        yield first, min(size, number - first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3_600, help="after those of the warm-up")
    parser.add_argument("--warm-up", type=int, default=1_200, help="requests")
    parser.add_argument("--replay-memory", default="32MB", help="what the ring may take")
    parser.add_argument("--replay-steps", default="2000", help="messages it may hold")
    parser.add_argument("--no-trouble", action="store_true")
    parser.add_argument("--mappings", action="store_true", help="say where it is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        endpoint = f"ipc://{folder}/engine"
        command = [str(Path(sys.executable).with_name("stepscope")), "serve", "--kv-memory", "64MB"]
        command += ["--endpoint", endpoint, "--replay-memory", args.replay_memory]
        command += ["--replay-steps", args.replay_steps]
        engine = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            with ControlClient(endpoint, timeout_s=2) as client:
                while True:
                    try:
                        info = client.info()
                        break
                    except EngineUnreachable:
                        time.sleep(0.2)
                weights_mb = info.weight_bytes / 2**20
                named = f"pool {pool_mb(info):.0f}, weights {weights_mb:.0f}"
                named += f", ring at most {args.replay_memory}"
                print(f"start: {resident_mb(engine.pid):.0f} MB ({named})", flush=True)
                levels: list[float] = []
                for first, number in rounds(args.warm_up + args.requests):
                    began_s = time.monotonic()
                    serve(client, number)
                    rate = number / (time.monotonic() - began_s)
                    if not args.no_trouble:
                        make_trouble(endpoint, info.telemetry_endpoint)
                    level = resident_mb(engine.pid)
                    told = ""
                    if args.mappings:
                        found = mappings_mb(engine.pid)
                        told = ", ".join(f"{name} {found[name]:.0f}" for name in sorted(found))
                    print(
                        f"{first + number:>6} requests: {level:.0f} MB  {rate:5.1f}/s  {told}",
                        flush=True,
                    )
                    if first >= args.warm_up:
                        levels.append(level)
        finally:
            engine.kill()
            engine.wait()
    growth = max(levels) / levels[0] - 1
    print(f"after the warm-up: {levels[0]:.0f} MB, at most {max(levels):.0f} MB: {growth:+.1%}")
    return 0 if growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
