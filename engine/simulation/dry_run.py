"""Runs the scheduler alone on a workload from a file: shows which requests each step would have.

A workload is a JSON object in which time is counted in steps:

    {"max_num_batched_tokens": 512, "max_num_seqs": 16, "num_blocks": 65, "block_size": 16,
     "requests": [{"arrival_step": 0, "prompt_len": 100, "output_len": 80}, ...]}

At step s the requests with `arrival_step` s are added in list order, then one step is scheduled,
then every request whose prompt is complete gets one token (no request stops before `output_len`).

More fields of the object: Every knob may be set by its name. `budget` maps a step to the token
budget from that step on. `num_blocks` includes one block that is never used, as in vLLM, so that
schedules recorded from vLLM can be compared line by line.

More fields of a request: `tokens` is the content of its prompt; prompts without it have no prefix
in common. `output` is its output tokens, which matter if they are guessed (the knob `speculative`);
without it they are zeros.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.knobs import ConfigError, Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Preempted
from stepscope.engine.scheduling.acceptance import bursts_of, has_drafts, take_bursts
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**62)]


class WorkloadRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    arrival_step: Annotated[int, Meta(ge=0, le=1_000_000)]  # bounded, because each step is a line
    prompt_len: Count
    output_len: Count
    priority: int = 0
    tokens: list[TokenId] | None = None
    output: list[TokenId] | None = None


class ScheduleWorkload(Knobs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    requests: list[WorkloadRequest]
    num_blocks: Annotated[int, Meta(ge=2, le=2**26)]
    block_size: Annotated[int, Meta(ge=1, le=2**20)] = 16
    max_model_len: Count = 4096
    budget: dict[int, Count] = msgspec.field(default_factory=dict)
    # For people; these do not affect the schedule.
    name: str = ""
    comment: str = ""
    seed: int | None = None

    @property
    def knobs(self) -> Knobs:
        return Knobs(**{name: getattr(self, name) for name in Knobs.__struct_fields__})

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1


class ScheduleLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of scheduling one step. Requests are numbered by their order in the workload."""

    step: int
    sched: dict[str, int]  # request -> tokens, in the order of scheduling
    total: int
    preempted: list[int]  # in order of their numbers
    new: list[int]  # admitted, for the first time or again
    running: list[int]  # in order of admission, after scheduling
    waiting: int
    free_blocks: int  # after scheduling
    finished: list[int]
    padded: int = 0  # padding tokens of a static batch; left out if 0


def parse_workload(
    data: bytes, source: str, overrides: Mapping[str, Any] | None = None
) -> ScheduleWorkload:
    """Read and check a workload. Raises ConfigError: says what is wrong, in one line."""
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
    except (RecursionError, UnicodeDecodeError, msgspec.DecodeError) as error:
        what = "a workload is a JSON object with num_blocks and requests (see 'stepscope simulate "
        raise ConfigError(
            "bad_workload", f"{source}: {what}--help'), this is not: {error}"
        ) from error
    try:
        document |= overrides or {}
        workload = msgspec.convert(document, ScheduleWorkload, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError("bad_workload", f"{source}: {in_words(error).text}") from error
    for problem in _problems(workload):
        raise ConfigError("bad_workload", f"{source}: {problem}")
    return workload


def _problems(workload: ScheduleWorkload) -> Iterator[str]:
    if any(step < 0 for step in workload.budget):
        yield "budget: steps count from 0"
    last = {0: workload.max_num_batched_tokens, **workload.budget}
    step, longest = max(last), _longest(workload)
    if not workload.enable_chunked_prefill and last[step] < longest:
        yield (
            f"with enable_chunked_prefill=false, {longest} tokens may have to be computed in one "
            f"step, and the budget is {last[step]} from step {step} on"
        )
    num_slots = workload.num_usable_blocks * workload.block_size
    for number, request in enumerate(workload.requests):
        who, prompt_len, output_len = f"request {number}", request.prompt_len, request.output_len
        if request.tokens is not None and len(request.tokens) != prompt_len:
            yield f"{who} has {len(request.tokens)} tokens, its prompt_len says {prompt_len}"
        if request.output is not None and len(request.output) != output_len:
            num_given = len(request.output)
            yield f"{who} has an output of {num_given} tokens, its output_len says {output_len}"
        num_tokens = prompt_len + output_len
        if num_tokens > workload.max_model_len:
            most = workload.max_model_len
            yield f"{who} has {num_tokens} tokens, prompt and output, and max_model_len is {most}"
        if num_tokens - 1 > num_slots:
            yield (
                f"{who} can never finish: it needs the KV of {num_tokens - 1} tokens, and "
                f"num_blocks={workload.num_blocks} (one of them is never used) have room for "
                f"{num_slots}"
            )


def _longest(workload: ScheduleWorkload) -> int:
    lengths = (each.prompt_len + each.output_len - 1 for each in workload.requests)
    return max(lengths, default=1)


class ScheduleReplay:
    """Schedules a workload step by step; between steps, callers may read `scheduler` and `rows`."""

    def __init__(self, workload: ScheduleWorkload) -> None:
        self.scheduler = _scheduler(workload)
        self.rows: list[ScheduledRow] = []  # rows of the step that was yielded last
        self._workload = workload

    def lines(self) -> Iterator[ScheduleLine]:
        """Yield one line for each step until all requests have finished; the last one is empty."""
        scheduler, workload = self.scheduler, self._workload
        arrivals: dict[int, list[Request]] = {}
        for number, wanted in enumerate(workload.requests):
            arrivals.setdefault(wanted.arrival_step, []).append(_request(number, wanted))
        step = 0
        while arrivals or scheduler.has_work():
            for request in arrivals.pop(step, ()):
                scheduler.add(request)
            if step in workload.budget:
                scheduler.knobs = msgspec.structs.replace(
                    scheduler.knobs, max_num_batched_tokens=workload.budget[step]
                )
            yield self._one_step(step)
            step += 1
        yield self._one_step(step)

    def _one_step(self, step: int) -> ScheduleLine:
        scheduler = self.scheduler
        self.rows = rows = scheduler.schedule()
        running = [request.request_id for request in scheduler.running]
        num_waiting = len(scheduler.waiting)
        num_free_blocks = scheduler.kv.num_free_blocks
        new = list(scheduler.admitted_now)
        finished = [request.request_id for request in self._update(rows)]
        scheduler.kv.drain_moves()
        lost = (each for each in scheduler.drain_events() if isinstance(each, Preempted))
        return ScheduleLine(
            step=step, sched={str(row.request.request_id): row.num_tokens for row in rows},
            total=sum(row.num_tokens for row in rows), new=new, running=running,
            preempted=sorted(each.request_id for each in lost), waiting=num_waiting,
            free_blocks=num_free_blocks, finished=finished, padded=scheduler.num_padded_tokens,
        )  # fmt: skip

    def _update(self, rows: list[ScheduledRow]) -> list[Request]:
        sampled = {
            index: [self._token(row, i) for i in range(row.num_tokens if has_drafts(row) else 1)]
            for index, row in enumerate(rows)
            if row.samples
        }
        token_ids = [sampled[i][0] if i in sampled else None for i in range(len(rows))]
        result = StepResult(token_ids, 0, 0, bursts=bursts_of(rows, sampled))
        return take_bursts(self.scheduler, rows, result)[0]

    def _token(self, row: ScheduledRow, depth: int) -> int:
        """Return the output token that comes `depth` tokens after the next one of a request."""
        request = row.request
        output = self._workload.requests[request.request_id].output
        return 0 if output is None else output[request.num_output_tokens + depth]


def _scheduler(workload: ScheduleWorkload) -> Scheduler:
    num_blocks = workload.num_usable_blocks
    knobs = workload.knobs
    # vLLM takes the watermark's share of all blocks, with the one that is never used. Half a block
    # more makes our share of the usable blocks the same whole number.
    kept_free = int(knobs.watermark * workload.num_blocks)
    if kept_free:
        knobs = msgspec.structs.replace(knobs, watermark=(kept_free + 0.5) / num_blocks)
    limits = Limits(
        max_num_batched_tokens=max(knobs.max_num_batched_tokens, *workload.budget.values(), 1),
        max_num_seqs=knobs.max_num_seqs,
        max_model_len=_longest(workload),
    )
    return Scheduler(KVCacheManager(num_blocks, workload.block_size), knobs, limits)


def _request(number: int, wanted: WorkloadRequest) -> Request:
    # A prompt without given tokens begins with a unique one.
    tokens = wanted.tokens or [-1 - number] + [0] * (wanted.prompt_len - 1)
    return Request(
        request_id=number,
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=wanted.output_len, ignore_eos=True),
        arrival_ns=number,
        priority=wanted.priority,
    )
