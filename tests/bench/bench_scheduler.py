"""What one decode-only step costs around the model: schedule, update, and the record of it.

    python tests/bench/bench_scheduler.py [--steps 320]

Every request decodes, so that each takes and registers a block once in `BLOCK_SIZE` steps. One
column a part of the step: `schedule()`, `update()`, building the record (rows of the batch and
block moves), encoding it, publishing it (encoding included) to a PUB socket that nobody reads, and
the record in all. Medians of one core; the garbage of the start is frozen, as the engine does.

Lines of one table are measured in turn, so that they see the same machine: what a longer waiting
queue and a larger pool add.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping

from common import medians, parser, turns

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import StepResult
from stepscope.engine.telemetry.batch_rows import BatchRows
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_draft import StepDraft

BLOCK_SIZE, NUM_BLOCKS = 16, 40_000
PARTS = ("schedule", "update", "build", "encode", "publish", "record")


def decoding(num_running: int, num_waiting: int, num_blocks: int) -> Scheduler:
    """A scheduler in which `num_running` requests decode and the others wait for a seat."""
    limits = Limits(max_num_batched_tokens=1 << 20, max_num_seqs=num_running, max_model_len=1 << 10)
    settings = Knobs(max_num_batched_tokens=1 << 20, max_num_seqs=num_running)
    scheduler = Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), settings, limits)
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    for number in range(num_running + num_waiting):
        first = number << 10
        prompt = list(range(first, first + 16 + number % BLOCK_SIZE))
        scheduler.add(Request(number, prompt, sampling, arrival_ns=number, priority=number % 3))
    rows = scheduler.schedule()  # the prompts
    scheduler.update(rows, [7 if row.samples else None for row in rows])
    return scheduler


def stepper(publisher: Publisher, scheduler: Scheduler) -> Callable[[], tuple[float, ...]]:
    """What runs a step with made-up tokens, and returns the microseconds of its `PARTS`."""
    batch_rows, clock = BatchRows(scheduler), time.perf_counter_ns
    number = 0

    def step() -> tuple[float, ...]:
        nonlocal number
        start = clock()
        rows = scheduler.schedule()
        scheduled = clock()
        batch = batch_rows.encode(rows)
        draft = StepDraft.open(number, (0, 1), batch, scheduler, knobs_version=0)
        batched = clock()
        token_ids: list[int | None] = [7 if row.samples else None for row in rows]
        result = StepResult(token_ids, launch_ns=start, tokens_ns=batched)
        known = clock()
        scheduler.update(rows, token_ids)
        updated = clock()
        draft.end(result, scheduler.kv)
        draft.events = scheduler.drain_events()
        built = clock()
        wire.encode(draft)
        encoded = clock()
        publisher.publish(draft)
        published = clock()
        number += 1
        build, publish = batched - scheduled + built - updated, published - encoded
        took = (
            *(scheduled - start, updated - known, build),
            *(encoded - built, publish, build + publish),
        )
        return tuple(each / 1e3 for each in took)

    return step


def table(title: str, arms: Mapping[str, Callable[[], tuple[float, ...]]], num_steps: int) -> None:
    gc.collect()
    gc.freeze()
    found = turns(arms, num_steps)
    gc.unfreeze()
    print(f"\n{title:<44}" + "".join(f"{name:>10}" for name in PARTS))
    for name, costs in found.items():
        print(f"{name:<44}" + "".join(f"{us:>10.1f}" for us in medians(costs)), flush=True)


def main() -> None:
    num_steps = parser(__doc__, steps=320).parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(f"ipc://{folder}/telemetry", ring_size=1000)

        def step_of(num_running: int, num_waiting: int, num_blocks: int) -> Callable[..., tuple]:
            return stepper(publisher, decoding(num_running, num_waiting, num_blocks))

        for running in (16, 64, 256, 1024):
            arms = {
                f"{running:>6} running, {count:>7,} waiting": step_of(running, count, NUM_BLOCKS)
                for count in (0, 10, 1000, 100_000)
            }
            table("running, waiting (40,000 blocks; us)", arms, num_steps)
        sizes = (20_000, 40_000, 400_000)
        arms = {f"{size:>9,} blocks": step_of(256, 0, size) for size in sizes}
        table("pool, 256 running (us)", arms, num_steps)
        publisher.close()


if __name__ == "__main__":
    main()
