"""What telemetry costs a step: the demo model, decode steps, publishing switched every few steps.

One run, so that both sides see the same machine; a subscriber in a process of its own reads along.

    python tests/bench/bench_telemetry.py [--requests 64] [--rounds 40]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

from stepscope.engine import dispatch
from stepscope.engine.commands import SamplingParams, Submit
from stepscope.engine.config import EngineConfig, Knobs, Limits
from stepscope.engine.core import EngineCore
from stepscope.engine.environment import prepare_environment
from stepscope.engine.inbox import Call
from stepscope.engine.kv_cache import KVCacheManager
from stepscope.engine.scheduler import Scheduler
from stepscope.engine.serve import Silent
from stepscope.engine.simulated import simulated_info
from stepscope.engine.telemetry import Publisher

STEPS_A_ROUND = 10
SUBSCRIBER = """
import sys, zmq
socket = zmq.Context.instance().socket(zmq.SUB)
socket.connect(sys.argv[1]); socket.subscribe(b"")
while True: socket.recv_multipart()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--subscribers", type=int, default=1)
    args = parser.parse_args()

    config = EngineConfig(kv_memory="512MB")
    prepare_environment(config)
    from stepscope.engine.runner import ModelRunner

    runner = ModelRunner.load(config, lambda what, share: None)
    limits = Limits(
        max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=runner.max_model_len
    )
    scheduler = Scheduler(
        KVCacheManager(runner.num_blocks, config.block_size),
        Knobs(max_num_batched_tokens=8192),
        limits,
    )
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(f"ipc://{folder}/telemetry", ring_size=1000)
        subscribers = [
            subprocess.Popen([sys.executable, "-c", SUBSCRIBER, f"ipc://{folder}/telemetry"])
            for _ in range(args.subscribers)
        ]
        core = EngineCore(
            simulated_info(limits, runner.num_blocks, config.block_size, seed=0),
            runner, scheduler, limits, publisher, dispatch.apply,
        )  # fmt: skip
        num_tokens = 2 * args.rounds * STEPS_A_ROUND + 50
        for number in range(args.requests):
            submit = Submit(sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True))
            token_ids = [(number * 37 + i) % 256 for i in range(64)]
            core.inbox.put(Call(submit, Silent(), token_ids))
        for _ in range(20):  # prefill, and a subscriber that has connected
            core.step()
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * args.rounds):
            published = turn % 4 in (0, 3)  # on, off, off, on: a drift falls on both alike
            core.sink = publisher if published else None
            for _ in range(STEPS_A_ROUND):
                start = time.perf_counter()
                core.step()
                times[published].append(time.perf_counter() - start)
        for subscriber in subscribers:
            subscriber.kill()
            subscriber.wait()
        publisher.close()
    on, off = (statistics.median(times[published]) * 1e3 for published in (True, False))
    cost = _publishing_cost_us(core, publisher)
    print(
        f"decode steps of {args.requests} requests, {len(times[True])} of each, "
        f"{args.subscribers} subscribers"
    )
    print(f"  telemetry off  {off:8.3f} ms median")
    print(f"  telemetry on   {on:8.3f} ms median   ratio {on / off:.4f}")
    print(f"  building and publishing one record, timed alone: {cost:.0f} us")


def _publishing_cost_us(core: EngineCore, publisher: Publisher) -> float:
    """Cost of a record outside of the noise of a step: the same calls that `step` makes."""
    from stepscope.engine import records
    from stepscope.engine.step import ScheduledRow, StepResult
    from stepscope.engine.wire import Phase, encode

    rows = [
        ScheduledRow(request, Phase.DECODE, request.num_computed_tokens, 1, True)
        for request in core.scheduler.running
    ]
    result = StepResult([0] * len(rows), launch_ns=0, tokens_ns=1)
    samples = []
    for _ in range(500):
        start = time.perf_counter()
        record = records.step_record(
            step=0,
            schedule_ns=(0, 0),
            result=result,
            batch=records.batch_rows(rows, core.scheduler),
            scheduler=core.scheduler,
            knobs_version=0,
            events=[],
            num_dropped=0,
        )
        encode(record)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e6


if __name__ == "__main__":
    main()
