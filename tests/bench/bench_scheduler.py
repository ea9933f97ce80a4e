"""What one decode-only step costs around the model: schedule, update, and the record of it.

    python tests/bench/bench_scheduler.py [--quick]

Every request decodes, so that each takes and registers a block once in `block_size` steps. One
column a part of the step: `schedule()`, `update()`, building the record (rows of the batch and
block moves), encoding it, and publishing it (encoding included) to a PUB socket that nobody reads.
Medians of one core; the garbage of the start is frozen, as the engine does.

Lines of one table are measured in turn, so that they see the same machine: what a longer waiting
queue and a larger pool add.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult
from stepscope.engine.telemetry.batch_rows import BatchRows
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_draft import StepDraft

BLOCK_SIZE = 16
NUM_STEPS = 320
NUM_BLOCKS = 40_000


class Cost(NamedTuple):
    """Costs of one step, in microseconds."""

    schedule: float
    update: float
    build: float
    encode: float
    publish: float


class Timed:
    """A scheduler whose steps are timed part by part, with made-up tokens."""

    def __init__(self, publisher: Publisher, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._publisher = publisher
        self._batch_rows = BatchRows(scheduler)
        self._step = 0

    def step(self) -> Cost:
        scheduler, clock = self.scheduler, time.perf_counter_ns
        start = clock()
        rows = scheduler.schedule()
        scheduled = clock()
        batch = self._batch_rows.encode(rows)
        draft = StepDraft.open(self._step, (0, 1), batch, scheduler, knobs_version=0)
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
        self._publisher.publish(draft)
        published = clock()
        self._step += 1
        return Cost(
            schedule=(scheduled - start) / 1e3,
            update=(updated - known) / 1e3,
            build=(batched - scheduled + built - updated) / 1e3,
            encode=(encoded - built) / 1e3,
            publish=(published - encoded) / 1e3,
        )


def decoding(num_running: int, num_waiting: int, num_blocks: int) -> Scheduler:
    """A scheduler in which `num_running` requests decode and the others wait for a seat."""
    limits = Limits(max_num_batched_tokens=1 << 20, max_num_seqs=num_running, max_model_len=1 << 10)
    settings = Knobs(max_num_batched_tokens=1 << 20, max_num_seqs=num_running)
    scheduler = Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), settings, limits)
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    for number in range(num_running + num_waiting):
        first = number << 10
        prompt = list(range(first, first + 16 + number % BLOCK_SIZE))
        request = Request(number, prompt, sampling, arrival_ns=number, priority=number % 3)
        scheduler.add(request)
    finish_prompts(scheduler)
    return scheduler


def finish_prompts(scheduler: Scheduler) -> None:
    rows: list[ScheduledRow] = scheduler.schedule()
    scheduler.update(rows, [7 if row.samples else None for row in rows])


def alternately(timed: list[Timed], num_steps: int) -> Iterator[Cost]:
    """The median of each, measured in turn so that all see the same machine."""
    costs: list[list[Cost]] = [[] for _ in timed]
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        for each, own in zip(timed, costs, strict=True):
            own.append(each.step())
    gc.unfreeze()
    for own in costs:
        yield Cost(*(statistics.median(part) for part in zip(*own, strict=True)))


def show(title: str, cost: Cost) -> None:
    record = cost.build + cost.publish
    parts = "".join(f"{value:>10.1f}" for value in cost)
    print(f"{title:<44}{parts}{record:>10.1f}", flush=True)


def head(title: str) -> None:
    names = "".join(f"{name:>10}" for name in (*Cost._fields, "record"))
    print(f"\n{title:<44}{names}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of one decode-only step, in microseconds.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    num_steps = NUM_STEPS // 10 if parser.parse_args().quick else NUM_STEPS
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(f"ipc://{folder}/telemetry", ring_size=1000)

        def timed(num_running: int, num_waiting: int, num_blocks: int) -> Timed:
            return Timed(publisher, decoding(num_running, num_waiting, num_blocks))

        head("running, waiting (40,000 blocks; us)")
        for num_running in (16, 64, 256, 1024):
            waiting = (0, 10, 1000, 100_000)
            each = [timed(num_running, count, NUM_BLOCKS) for count in waiting]
            for count, cost in zip(waiting, alternately(each, num_steps), strict=True):
                show(f"{num_running:>6} running, {count:>7,} waiting", cost)

        head("pool, 256 running (us)")
        sizes = (20_000, 40_000, 400_000)
        each = [timed(256, 0, size) for size in sizes]
        for size, cost in zip(sizes, alternately(each, num_steps), strict=True):
            show(f"{size:>9,} blocks", cost)
        publisher.close()


if __name__ == "__main__":
    main()
