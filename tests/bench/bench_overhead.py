"""Where telemetry spends the engine's thread's time, measured by leaving out one part at a time.

Decode steps of an engine without a model; --pause says what its thread does for the 2 ms that a
model would take, for that decides what is in the caches. Turns of ten steps take place in random
order, each with another part of the way left out, and are compared with the turns without telemetry
beside them. Processor time of the engine's thread; a busy machine makes everything slower, so only
figures of one run can be compared.

    python tests/bench/bench_overhead.py --subscribers 5 --pause spin
"""

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest.mock import patch

import msgspec
from bench_wire import engine, subscribers  # type: ignore[import-not-found]
from pausing_runner import PAUSES, PausingRunner  # type: ignore[import-not-found]

from stepscope.engine.loop.core import EngineCore
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.wire import Telemetry
from stepscope.engine.telemetry.batch_rows import BatchRows
from stepscope.engine.telemetry.publisher import Publisher

STEPS_A_TURN = 10
NUM_WARM = 2  # steps of a turn that are not counted
NO_ROWS = msgspec.Raw(b"\x90")
KEPT = Publisher(None, 20_000)  # sends nothing


def without_sending(publisher: Publisher, message: Telemetry) -> None:
    wire.encode_into(message, publisher._payload)
    KEPT.sender.add(message.topic, publisher._payload)


def only_encoding(publisher: Publisher, message: Telemetry) -> None:
    wire.encode_into(message, publisher._payload)


def nothing(*_: object, **__: object) -> None:
    return


def no_rows(*_: object) -> msgspec.Raw:
    return NO_ROWS


# The remaining parts of the way, in the order in which they are left out.
LEFT: dict[str, dict[str, Callable[..., object]]] = {
    "all of it": {},
    "without sending": {"publish": without_sending},
    "without the ring": {"publish": only_encoding},
    "without encoding": {"publish": nothing},
    "without its end": {"_publish_record": nothing},
    "without its rows": {"_publish_record": nothing, "encode": no_rows},
}
PLACES = {"publish": Publisher, "_publish_record": EngineCore, "encode": BatchRows}


def measure(num_requests: int, num_subscribers: int, rounds: int, pause: str) -> None:
    limits = Limits(max_num_batched_tokens=8192, max_num_seqs=num_requests, max_model_len=8192)
    core = engine(PausingRunner(pause), num_requests * 520, limits, rounds * 6)
    turns: list[str | None] = [None, *LEFT]
    times: dict[str | None, list[float]] = {turn: [] for turn in turns}
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/telemetry"
        publisher = Publisher(address, 20_000)
        with subscribers(address, num_subscribers):
            for _ in range(20):  # prefill, and subscribers that have connected
                core.step()
            time.sleep(0.5)
            gc.collect()
            gc.freeze()  # as `serve` does
            for _ in range(rounds):
                rng.shuffle(turns)
                for turn in turns:
                    core.publish_to(None if turn is None else publisher)
                    left = LEFT.get(turn or "", {})
                    cuts = [patch.object(PLACES[name], name, left[name]) for name in left]
                    for cut in cuts:
                        cut.start()
                    steps = []
                    for _ in range(NUM_WARM + STEPS_A_TURN):
                        start_s = time.thread_time()
                        core.step()
                        steps.append(time.thread_time() - start_s)
                    for cut in cuts:
                        cut.stop()
                    times[turn].append(statistics.median(steps[NUM_WARM:]))
        publisher.close()
    gc.unfreeze()
    off_us = statistics.median(times[None]) * 1e6
    print(
        f"{num_subscribers} subscribers, {num_requests} requests, pause: {pause}; "
        f"a step without: {off_us:.0f} us"
    )
    for name in LEFT:
        extra = statistics.median(a - b for a, b in zip(times[name], times[None], strict=True))
        print(f"  {name:20} {extra * 1e6:+5.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--subscribers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pause", choices=PAUSES, default="spin")
    args = parser.parse_args()
    measure(args.requests, args.subscribers, args.rounds, args.pause)


if __name__ == "__main__":
    main()
