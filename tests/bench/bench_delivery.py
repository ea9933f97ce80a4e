"""What it costs an engine to send every token of many streams to a client.

An engine without a model, one client in a process of its own that has so many requests at once, by
turns streamed (in bundles, or one by one as to older clients) and answered at their end. --pause
says what the engine's thread does for the 2 ms that a model would take. Processor time of the
engine's thread and of all others of its process (the control thread, libzmq's) for a step, and wall
time of a step; what matters is the difference.

    python tests/bench/bench_delivery.py --requests 256 --pause sleep
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pausing_runner import PausingRunner  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parents[2]))

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from tests.support.engines.live_engine import running_engine

NUM_TOKENS = 300
CLIENT = """
import sys
from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Output
from stepscope.engine.protocol.settings.sampling_params import SamplingParams

with ControlClient(sys.argv[1]) as client:
    count, num_tokens = int(sys.argv[2]), int(sys.argv[3])
    for line in sys.stdin:
        streams = line != "at the end\\n"
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        for i in range(count):
            prompt = [(i * 37 + j) % 256 for j in range(64)]
            client.send(Submit(
                client_id=str(i),
                prompt_token_ids=prompt,
                sampling=sampling,
                stream=streams,
                bundle=line == "bundles\\n",
            ))
        ended = received = 0
        while ended < count:
            _, reply = client.receive(60.0)
            if isinstance(reply, Output):
                received += len(reply.token_ids)
                ended += reply.finish_reason is not None
        assert received == count * num_tokens, received
        print("done", flush=True)
"""


class Noted(PausingRunner):  # type: ignore[misc]
    """Notes when a decode step of all requests begins, and the thread's processor time by then."""

    def __init__(self, pause: str, num_requests: int) -> None:
        super().__init__(pause)
        self.steps: list[tuple[float, float, float]] = []
        self._num_requests = num_requests

    def execute(self, step: ScheduledStep) -> StepResult:
        if len(step.rows) == self._num_requests and all(row.start >= 64 for row in step.rows):
            self.steps.append((time.perf_counter(), time.thread_time(), time.process_time()))
        return super().execute(step)


def measure(num_requests: int, rounds: int, pause: str) -> None:
    limits = Limits(max_num_batched_tokens=65536, max_num_seqs=num_requests, max_model_len=1024)
    runner = Noted(pause, num_requests)
    knobs = Knobs(max_num_batched_tokens=65536, max_num_seqs=num_requests)
    found: dict[str, list[tuple[float, float, float]]] = {
        kind: [] for kind in ("bundles", "streams", "at the end")
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        running_engine(
            f"{folder}/engine",
            limits=limits,
            num_blocks=num_requests * 32,
            runner=runner,
            knobs=knobs,
        ),
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, f"{folder}/engine", str(num_requests), str(NUM_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        for _ in range(rounds):
            for kind, steps in found.items():
                runner.steps.clear()
                client.stdin.write(kind + "\n")
                client.stdin.flush()
                assert client.stdout.readline() == "done\n"
                steps.append(_a_step(runner.steps))
    print(f"{num_requests} requests, pause: {pause}, us a step   wall  engine's thread  the others")
    for kind, steps in found.items():
        wall, engine_us, others = (
            statistics.median(each) * 1e6 for each in zip(*steps, strict=True)
        )
        print(f"  {kind:12} {wall:36,.0f} {engine_us:14,.0f} {others:11,.0f}")


def _a_step(steps: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Mean seconds a step: wall, engine's thread, all other threads."""
    if len(steps) < 50:
        raise SystemExit("the requests did not run side by side; is the machine very busy?")
    (wall, thread, process), (wall_end, thread_end, process_end) = steps[10], steps[-1]
    count = len(steps) - 11
    own = (thread_end - thread) / count
    return (wall_end - wall) / count, own, (process_end - process) / count - own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", choices=("sleep", "memory"), default="sleep")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    measure(args.requests, args.rounds, args.pause)


if __name__ == "__main__":
    main()
