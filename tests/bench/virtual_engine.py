"""The real scheduler and KV cache on a virtual clock, and what each request's wait was made of."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.config import Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.engine.simulation.step_time import StepShape, StepTimeModel, shape_of

BLOCK_SIZE = 16


class Arrival(NamedTuple):
    at_s: float
    token_ids: list[int]
    num_output_tokens: int


class Served(NamedTuple):
    """Seconds of the virtual clock; terms are summed over all steps until then."""

    at_s: float
    first_s: float
    last_s: float
    begin_terms: tuple[float, ...]
    first_terms: tuple[float, ...]
    last_terms: tuple[float, ...]


def serve(
    arrivals: Sequence[Arrival],
    model: StepTimeModel,
    knobs: Knobs,
    num_blocks: int,
    terms: Callable[[StepShape], tuple[float, ...]] = lambda shape: (),
) -> list[Served]:
    """Serve all of them, in the order of their arrivals.

    As vLLM does by default, a step is scheduled when the step before it begins: a request that
    arrives meanwhile waits for both. The time of the host is hidden that way.
    """
    limits = Limits(
        max_num_batched_tokens=knobs.max_num_batched_tokens,
        max_num_seqs=knobs.max_num_seqs,
        max_model_len=max(len(each.token_ids) + each.num_output_tokens for each in arrivals),
    )
    scheduler = Scheduler(KVCacheManager(num_blocks, BLOCK_SIZE), knobs, limits)
    begun: dict[int, tuple[float, tuple[float, ...]]] = {}
    first: dict[int, tuple[float, tuple[float, ...]]] = {}
    served: dict[int, Served] = {}
    now_s, before_s, number, upcoming = 0.0, -math.inf, 0, 0
    total = tuple(0.0 for _ in terms(StepShape(0, 0, 0, 0, 0)))
    while upcoming < len(arrivals) or scheduler.has_work():
        if not scheduler.has_work():
            now_s = before_s = max(now_s, arrivals[upcoming].at_s)
        while upcoming < len(arrivals) and arrivals[upcoming].at_s <= before_s:
            scheduler.add(_request(upcoming, arrivals[upcoming]))
            begun[upcoming] = (arrivals[upcoming].at_s, total)
            upcoming += 1
        rows = scheduler.schedule()
        shape = shape_of(ScheduledStep(number, rows, scheduler.num_padded_tokens))
        number += 1
        before_s, now_s = now_s, now_s + model.step_time(shape).cycle_s
        added = terms(shape)
        if added:
            total = tuple(map(float.__add__, total, added))
        for row in rows:
            if row.samples and row.request.request_id not in first:
                first[row.request.request_id] = (now_s, total)
        for request in scheduler.update(rows, [0 if row.samples else None for row in rows]):
            each = request.request_id
            at_s, begin = begun.pop(each)
            served[each] = Served(at_s, first[each][0], now_s, begin, first[each][1], total)
        scheduler.drain_events()
        scheduler.kv.drain_moves()
    return [served[each] for each in range(len(arrivals))]


def _request(number: int, arrival: Arrival) -> Request:
    sampling = SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True)
    return Request(number, arrival.token_ids, sampling, arrival_ns=number)
