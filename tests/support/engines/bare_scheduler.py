"""A scheduler without an engine: the requests that a test adds, and steps that it runs."""

import msgspec

from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow
from tests.support.engines.kv_integrity import check_integrity

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 100, max_model_len: int = 64, **knobs: object) -> Scheduler:
    settings = Knobs(**{"max_num_batched_tokens": 64, "max_num_seqs": 8, **knobs})
    limits = Limits(max_num_batched_tokens=256, max_num_seqs=64, max_model_len=max_model_len)
    return Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), settings, limits)


def turn(scheduler: Scheduler, **knobs: object) -> None:
    scheduler.knobs = msgspec.structs.replace(scheduler.knobs, **knobs)


def add(
    scheduler: Scheduler, number: int, num_prompt: int, max_tokens: int = 8, priority: int = 0
) -> Request:
    tokens = [number * 1000 + position for position in range(num_prompt)]
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(number, tokens, sampling, arrival_ns=number, priority=priority)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> dict[int, int]:
    """Run one step; return the tokens of each request, in the order scheduled."""
    rows = scheduler.schedule()
    check_integrity(scheduler.kv)
    scheduler.update(rows, [0 if row.samples else None for row in rows])
    check_integrity(scheduler.kv)
    return tokens_of(rows)


def tokens_of(rows: list[ScheduledRow]) -> dict[int, int]:
    return {row.request.request_id: row.num_tokens for row in rows}
