"""Run the scheduler alone over a written workload, without a model: who would be in which step.

A workload is a JSON file in which time is counted in steps:

    {"max_num_batched_tokens": 512, "max_num_seqs": 16, "num_blocks": 65, "block_size": 16,
     "requests": [{"arrival_step": 0, "prompt_len": 100, "output_len": 80}, ...]}

At step s the requests with `arrival_step` s are added in list order, then one step is scheduled,
then every request whose prompt is complete gets one token (never a stop before `output_len`).
`budget` maps a step to the token budget in force from it on. `tokens` gives a prompt where its
content matters; prompts without it share nothing. `num_blocks` counts one block that is never
used, as vLLM's does, so that schedules recorded from vLLM can be compared line by line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from stepscope.engine.commands import SamplingParams
from stepscope.engine.config import ConfigError, Knobs, Limits, Order, Policy, Reserve
from stepscope.engine.kv_cache import KVCacheManager
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Scheduler
from stepscope.engine.wire import Preempted

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class WorkloadRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    arrival_step: Annotated[int, Meta(ge=0)]
    prompt_len: Count
    output_len: Count
    priority: int = 0
    tokens: list[int] | None = None


class ScheduleWorkload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is scheduled, and under which settings. Names are those of the knobs."""

    requests: list[WorkloadRequest]
    num_blocks: Annotated[int, Meta(ge=2)]
    block_size: Count = 16
    max_model_len: Count = 4096
    max_num_batched_tokens: Count = 2048
    max_num_seqs: Count = 256
    budget: dict[int, Count] = {}
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Meta(ge=0)] = 0
    order: Order = "arrival"
    policy: Policy = "fcfs"
    reserve: Reserve = "prompt"
    enable_prefix_caching: bool = True
    watermark: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.0


class ScheduleLine(Struct, frozen=True, kw_only=True):
    """One step. Requests are numbered by their place in the workload."""

    step: int
    sched: dict[str, int]  # request -> tokens, in the order scheduled
    total: int
    preempted: list[int]  # in order of their numbers
    new: list[int]  # admitted, for the first time or again
    running: list[int]  # in order of admission, after scheduling
    waiting: int
    free_blocks: int  # after scheduling
    finished: list[int]


def load_workload(path: Path) -> ScheduleWorkload:
    """Read and check a workload file.

    Raises:
        ConfigError: what is wrong with it, in one line.
        OSError: the file cannot be read.
    """
    try:
        workload = msgspec.json.decode(path.read_bytes(), type=ScheduleWorkload)
    except msgspec.DecodeError as error:
        raise ConfigError("bad_workload", f"{path} is no workload: {error}") from error
    room = min((workload.num_blocks - 1) * workload.block_size, workload.max_model_len)
    for number, request in enumerate(workload.requests):
        if request.tokens is not None and len(request.tokens) != request.prompt_len:
            raise ConfigError(
                "bad_workload",
                f"{path}: request {number} has {len(request.tokens)} tokens, "
                f"its prompt_len says {request.prompt_len}",
            )
        if request.prompt_len + request.output_len > room:
            raise ConfigError(
                "bad_workload",
                f"{path}: request {number} needs {request.prompt_len + request.output_len} "
                f"tokens, max_model_len and num_blocks leave room for {room}",
            )
    return workload


def replay(workload: ScheduleWorkload) -> Iterator[ScheduleLine]:
    """Schedule the workload step by step; the last step, when all is done, is an empty one."""
    scheduler = _scheduler(workload)
    arrivals: dict[int, list[Request]] = {}
    for number, wanted in enumerate(workload.requests):
        arrivals.setdefault(wanted.arrival_step, []).append(_request(number, wanted, workload))
    step = 0
    while arrivals or scheduler.has_work():
        for request in arrivals.pop(step, ()):
            scheduler.add(request)
        if step in workload.budget:
            scheduler.knobs = msgspec.structs.replace(
                scheduler.knobs, max_num_batched_tokens=workload.budget[step]
            )
        yield _one_step(scheduler, step)
        step += 1
    yield _one_step(scheduler, step)


def _one_step(scheduler: Scheduler, step: int) -> ScheduleLine:
    rows = scheduler.schedule()
    running = [request.request_id for request in scheduler.running]
    num_waiting = len(scheduler.waiting)
    num_free_blocks = scheduler.kv.num_free_blocks
    new = list(scheduler.admitted_now)
    finished = scheduler.update(rows, [0 if row.samples else None for row in rows])
    scheduler.kv.drain_moves()
    events = scheduler.drain_events()
    return ScheduleLine(
        step=step,
        sched={str(row.request.request_id): row.num_tokens for row in rows},
        total=sum(row.num_tokens for row in rows),
        preempted=sorted(event.request_id for event in events if isinstance(event, Preempted)),
        new=new,
        running=running,
        waiting=num_waiting,
        free_blocks=num_free_blocks,
        finished=[request.request_id for request in finished],
    )


def _scheduler(workload: ScheduleWorkload) -> Scheduler:
    num_blocks = workload.num_blocks - 1
    names = set(Knobs.__struct_fields__) & set(ScheduleWorkload.__struct_fields__)
    knobs = Knobs(**{name: getattr(workload, name) for name in sorted(names)})
    # vLLM takes its share of all blocks, the one that is never used included: half a block more
    # makes the share of the usable ones come to the same whole number.
    kept_free = int(workload.watermark * workload.num_blocks)
    if kept_free:
        knobs = msgspec.structs.replace(knobs, watermark=(kept_free + 0.5) / num_blocks)
    limits = Limits(
        max_num_batched_tokens=max(workload.max_num_batched_tokens, *workload.budget.values(), 1),
        max_num_seqs=workload.max_num_seqs,
        max_model_len=min(workload.max_model_len, num_blocks * workload.block_size),
    )
    return Scheduler(KVCacheManager(num_blocks, workload.block_size), knobs, limits)


def _request(number: int, wanted: WorkloadRequest, workload: ScheduleWorkload) -> Request:
    first = number * workload.max_model_len
    return Request(
        request_id=number,
        prompt_token_ids=wanted.tokens or list(range(first, first + wanted.prompt_len)),
        sampling=SamplingParams(max_tokens=wanted.output_len, ignore_eos=True),
        arrival_ns=number,
        priority=wanted.priority,
    )
