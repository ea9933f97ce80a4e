"""What one decode-only step costs in the scheduler: `schedule()` + `update()`, without a model.

    python tests/bench/bench_scheduler.py

Every request decodes, so that each takes and registers a block once in `block_size` steps. The
last lines show what a larger pool and a long waiting queue add.
"""

import statistics
import time

from stepscope.engine.commands import SamplingParams
from stepscope.engine.config import Knobs, Limits, Order
from stepscope.engine.kv_cache import KVCacheManager
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_STEPS = 480


def decoding(num_running: int, num_waiting: int, num_blocks: int, order: Order) -> Scheduler:
    """A scheduler in which `num_running` requests decode and the others wait for a seat."""
    limits = Limits(max_num_batched_tokens=1 << 20, max_num_seqs=num_running, max_model_len=1 << 10)
    knobs = Knobs(max_num_batched_tokens=1 << 20, max_num_seqs=num_running, order=order)
    scheduler = Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), knobs, limits)
    sampling = SamplingParams(max_tokens=NUM_STEPS + 64, ignore_eos=True)
    for number in range(num_running + num_waiting):
        first = number << 10
        prompt = list(range(first, first + 64 + number % BLOCK_SIZE))
        scheduler.add(Request(number, prompt, sampling, arrival_ns=number))
    step_us(scheduler)
    return scheduler


def step_us(scheduler: Scheduler) -> float:
    """Microseconds of one step. Tokens are made, and telemetry drained, off the clock."""
    start = time.perf_counter_ns()
    rows = scheduler.schedule()
    scheduled = time.perf_counter_ns()
    token_ids: list[int | None] = [7 if row.samples else None for row in rows]
    known = time.perf_counter_ns()
    scheduler.update(rows, token_ids)
    end = time.perf_counter_ns()
    scheduler.drain_events()
    scheduler.kv.drain_moves()
    return (scheduled - start + end - known) / 1e3


def main() -> None:
    print(" running  waiting    blocks  order         median us   p99 us")
    cases: list[tuple[int, int, int, Order]] = [
        (64, 0, 100_000, "decode_first"),
        (256, 0, 100_000, "decode_first"),
        (1024, 0, 100_000, "decode_first"),
        (1024, 0, 100_000, "arrival"),
        (256, 0, 1_000_000, "decode_first"),
        (256, 20_000, 100_000, "decode_first"),
    ]
    for num_running, num_waiting, num_blocks, order in cases:
        scheduler = decoding(num_running, num_waiting, num_blocks, order)
        times = sorted(step_us(scheduler) for _ in range(NUM_STEPS))
        print(
            f"{num_running:>8}{num_waiting:>9}{num_blocks:>10}  {order:<13}"
            f"{statistics.median(times):>10.0f}{times[int(len(times) * 0.99)]:>9.0f}"
        )


if __name__ == "__main__":
    main()
