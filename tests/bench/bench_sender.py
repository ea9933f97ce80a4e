"""What the compiled sender saves against the one in Python, of whole steps.

Decode steps with telemetry off, sent by the engine's thread (`InlineSender`) and by the compiled
thread, by turns of ten steps in random order; each turn is held against the one without telemetry
of its round. Once with the demo model, once with a thread that spins for 5 ms instead of a model.

    python tests/bench/bench_sender.py --subscribers 1
"""

import argparse
import gc
import random
import statistics
import tempfile
import time
from unittest.mock import patch

from bench_wire import (  # type: ignore[import-not-found]
    added,
    engine,
    forward_pass_left_out,
    subscribers,
)
from pausing_runner import PausingRunner  # type: ignore[import-not-found]

from stepscope.engine.execution.machine.environment import prepare_environment
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.telemetry import sender
from stepscope.engine.telemetry.publisher import Publisher

STEPS_A_TURN = 10
NUM_WARM = 2  # steps of a turn that are not counted
TURNS = ("off", "python", "compiled")


def measure(core: EngineCore, num_subscribers: int, rounds: int, what: str) -> None:
    """Wall time of a step besides its forward pass; shares are of the whole step."""
    whole: dict[str, list[float]] = {turn: [] for turn in TURNS}
    beside: dict[str, list[float]] = {turn: [] for turn in TURNS}
    rng = random.Random(1)
    turns = list(TURNS)
    with tempfile.TemporaryDirectory() as folder:
        addresses = {name: f"ipc://{folder}/{name}" for name in TURNS[1:]}
        with patch.object(sender, "compiled", None):
            python = Publisher(addresses["python"], 20_000)
        publishers = {"python": python, "compiled": Publisher(addresses["compiled"], 20_000)}
        with (
            subscribers(addresses["python"], num_subscribers),
            subscribers(addresses["compiled"], num_subscribers),
            forward_pass_left_out(core) as clock,
        ):
            for _ in range(20):  # prefill, and subscribers that have connected
                core.step()
            time.sleep(1)
            gc.collect()
            gc.freeze()  # as `serve` does
            for _ in range(rounds):
                rng.shuffle(turns)
                for turn in turns:
                    core.publish_to(publishers.get(turn))
                    steps = []
                    for _ in range(STEPS_A_TURN):
                        start_s, beside_s = time.perf_counter(), clock()
                        core.step()
                        steps.append((time.perf_counter() - start_s, clock() - beside_s))
                    counted = steps[NUM_WARM:]
                    whole[turn].append(statistics.median(step[0] for step in counted))
                    beside[turn].append(statistics.median(step[1] for step in counted))
        for publisher in publishers.values():
            publisher.close()
    gc.unfreeze()
    step_s = statistics.median(whole["off"])
    print(f"{what}, {num_subscribers} subscribers: a step without telemetry {step_s * 1e3:.2f} ms")
    for a, b in (("python", "off"), ("compiled", "off"), ("python", "compiled")):
        extra_s = statistics.median(x - y for x, y in zip(beside[a], beside[b], strict=True))
        print(
            f"  {a:8} against {b:8}: {added(beside[a], beside[b])} us, {extra_s / step_s:.2%} of "
            f"the step; whole steps {added(whole[a], whole[b])} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--subscribers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    if not sender.is_compiled():
        parser.error("the compiled sender is not there: it needs a C compiler when installed")
    limits = Limits(max_num_batched_tokens=8192, max_num_seqs=args.requests, max_model_len=8192)
    core = engine(PausingRunner("spin", 0.005), args.requests * 520, limits, args.rounds * 2)
    measure(core, args.subscribers, args.rounds, "5 ms of spinning")
    config = EngineConfig(kv_memory="512MB")
    prepare_environment(config)
    from stepscope.engine.execution.loading import load_runner

    runner = load_runner(config, lambda what, share: None)
    limits = Limits(
        max_num_batched_tokens=8192, max_num_seqs=args.requests, max_model_len=runner.max_model_len
    )
    core = engine(runner, runner.num_blocks, limits, args.rounds * 2)
    measure(core, args.subscribers, args.rounds, "the demo model")


if __name__ == "__main__":
    main()
