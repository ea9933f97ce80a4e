"""What vLLM has scheduled for a step: who got blocks and tokens, and what the others wait for.

A request may be held back for a reason of its own: vLLM then passes over it. All others wait for
the same, which stopped vLLM's look into the queue.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from stepscope.engine.adapters.attached.tracked import Taken, TrackedRequest, UnfinishedStep
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.kv_blocks import BlockHolders
from stepscope.engine.adapters.vllm.versions import SchedulerOutput, VllmScheduler
from stepscope.engine.protocol.wire import Phase


def note_blocks(
    step: UnfinishedStep,
    out: SchedulerOutput,
    table: Mapping[str, TrackedRequest],
    holders: BlockHolders | None,
) -> None:
    """Add to `step` the admitted requests, and the blocks that requests received.

    They are in vLLM's order: it gives blocks to running requests first. `holders`: None if vLLM has
    kinds of layers that are not known.
    """

    def give(tracked: TrackedRequest, block_ids: Sequence[Sequence[int]], num_cached: int) -> None:
        if holders is None:
            taken = [Taken(tracked, list(filter(None, ids)), 0) for ids in block_ids]
        else:
            taken = holders.take(tracked, block_ids, num_cached)
        for each in taken:
            tracked.block_table += [0] * len(each.blocks)
        step.taken += taken

    def admit(tracked: TrackedRequest, block_ids: Sequence[Sequence[int]], num_cached: int) -> None:
        if tracked.was_preempted:
            tracked.num_known = tracked.engine_request.num_tokens
        tracked.was_overtaken = False
        tracked.block_table = [] if holders is None else [0] * holders.num_held[tracked]
        give(tracked, block_ids, num_cached)
        tracked.num_loaded = min(tracked.num_loaded, num_cached)
        step.admitted.append((tracked, num_cached - tracked.num_loaded))

    again = out.scheduled_cached_reqs
    for i, block_ids in enumerate(again.new_block_ids):
        if block_ids is None:
            continue
        name = again.req_ids[i]
        if name in again.resumed_req_ids:
            admit(table[name], block_ids, again.num_computed_tokens[i])
        else:
            give(table[name], block_ids, 0)
    for new in out.scheduled_new_reqs:  # vLLM's second model runner reports resumed ones as new
        admit(table[new.req_id], new.block_ids, new.num_computed_tokens)


def make_rows(
    step: UnfinishedStep, out: SchedulerOutput, table: Mapping[str, TrackedRequest]
) -> None:
    """Fill in `rows`, `batch` and `num_prefill_tokens` of `step`. Call `note_blocks` first."""
    ordinary, append = Phase.DECODE, step.rows.append
    again = out.scheduled_cached_reqs
    starts = dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
    starts.update((new.req_id, new.num_computed_tokens) for new in out.scheduled_new_reqs)
    drafts = out.scheduled_spec_decode_tokens
    for name, num_tokens in out.num_scheduled_tokens.items():
        tracked = table[name]
        start = starts[name]
        if num_tokens == 1 and not tracked.is_prefilling:
            append((tracked, ordinary, start, None))
        else:
            num_blocks, num_drafted = len(tracked.block_table), len(drafts.get(name, ()))
            step.add_row(tracked, start, num_tokens, num_blocks, num_drafted)
    step.encode()


_MOST_HELD = 256  # requests whose reason is looked for in a step
_OF_STATUS = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
    "WAITING_FOR_REMOTE_KVS": "remote_kv",
    "WAITING_FOR_STREAMING_REQ": "input",
}
_FIRST_ONLY = ("kv_blocks", "encoder")  # only the first waiting request is known to lack it


class HeldRequests:
    """The waiting requests that vLLM passes over, each with a reason of its own.

    `reasons`: by the id of the request, as of the last look.
    """

    def __init__(self, scheduler: VllmScheduler) -> None:
        self.reasons: Mapping[str, str] = {}
        self._scheduler = scheduler
        self._counts = 0, 0  # of running and waiting requests, at the last look

    def look_after(
        self, out: SchedulerOutput, num_waiting: int, *, is_due: bool, is_bound: bool
    ) -> Mapping[str, str] | None:
        """Look after `schedule()`, if that may have changed them. Returns them if it has, or None.

        `is_bound`: all wait for what comes before the encoder: seats, the budget or the cadence.

        With as many running and waiting requests as before, and none that begins, they can only
        have changed if one came as another left; so a look now and then (`is_due`) is enough. While
        vLLM is halted it holds back no single request: `num_waiting` is 0.
        """
        if num_waiting:
            counts = len(self._scheduler.running), num_waiting
            is_alike = counts == self._counts and not out.scheduled_new_reqs
            self._counts = counts
            if is_alike and not is_due:
                return None
        return self.look(num_waiting, is_bound=is_bound)

    def look(self, num_waiting: int, *, is_bound: bool = False) -> Mapping[str, str] | None:
        """Look who is held back. Returns them if that has changed, else None."""
        found = _held(self._scheduler, is_bound) if num_waiting else {}
        if found == self.reasons:
            return None
        self.reasons = found
        return found


def _held(scheduler: Any, is_bound: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    used: dict[int, str] | None = None  # the names of adapters that running requests use
    queue = getattr(scheduler, "deferred_waiting", getattr(scheduler, "skipped_waiting", ()))
    for request in islice(queue, _MOST_HELD):
        reason = _OF_STATUS.get(request.status.name)
        if reason is None and (adapter := getattr(request, "lora_request", None)) is not None:
            if used is None:
                all_used = (each.lora_request for each in scheduler.running)
                used = {each.lora_int_id: each.lora_name for each in all_used if each is not None}
            has_room = len(used) < scheduler.lora_config.max_loras
            if adapter.lora_int_id not in used and not has_room:
                reason = f"lora: {', '.join(used.values())}"
        if reason is None and getattr(scheduler, "connector", None) is not None:
            reason = "remote_kv"
        if reason is None and _is_left_for_encoder(scheduler, request):
            if is_bound or not _fits(scheduler, request):
                continue  # by now it waits for what the others wait for
            reason = "encoder"
        found[request.request_id] = reason or "deferred"
    return found


def _is_left_for_encoder(scheduler: Any, request: Any) -> bool:
    """Whether vLLM, from 0.33 on, has passed over a request because it had no encoder budget."""
    # Encoder outputs from elsewhere, or tokens of a step in flight, may be what it waits for.
    is_remote = getattr(scheduler, "ec_connector", None) is not None
    is_late = getattr(request, "num_stale_output_tokens", 0) > 0
    return getattr(request, "has_encoder_inputs", False) and not (is_remote or is_late)


def leaves_out_prefills(scheduler: Any, *, is_throttled: bool) -> bool:
    """Whether vLLM would have computed no prompt in the step that it has just scheduled.

    Its engine asks for that (`is_throttled`); from 0.33 on a single scheduler decides so itself.
    """
    interval: int = getattr(scheduler, versions.CADENCE, 1)
    if interval > 1:
        num_steps = scheduler.num_executed_steps - scheduler.last_prefill_step
        is_throttled |= 0 < num_steps < interval
    if not is_throttled or getattr(scheduler, "prefill_capacity_bound", False):
        return False
    return any(not getattr(request, "is_prefill_chunk", False) for request in scheduler.running)


def lacks_encoder_budget(scheduler: Any, held: Collection[str]) -> bool:
    """Whether the first request that is not `held` back waits for its encoder, not for blocks."""
    if not getattr(scheduler, "max_num_encoder_input_tokens", 0):
        return False
    first: Any = next((each for each in scheduler.waiting if each.request_id not in held), None)
    return getattr(first, "has_encoder_inputs", False) and _fits(scheduler, first)


def _fits(scheduler: Any, request: Any) -> bool:
    num_free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return bool(num_free * scheduler.block_size >= request.num_tokens)


def common_reason(
    scheduler: VllmScheduler,
    out: SchedulerOutput,
    num_seats: int,
    budget: int,
    held: Collection[str],
    *,
    is_without_prefills: bool,
) -> str:
    """Return what those wait for that are not held, if vLLM is not paused and preempted nobody."""
    if len(scheduler.running) >= num_seats:
        return "seats"
    if out.total_num_scheduled_tokens >= budget:
        return "budget"
    if is_without_prefills:
        return "cadence"
    return "encoder" if lacks_encoder_budget(scheduler, held) else "kv_blocks"


def counted(num_waiting: int, common: str, held: Mapping[str, str]) -> dict[str, int]:
    """Return how many requests wait for what; those held back for a reason of their own last."""
    rest = max(0, num_waiting - len(held))
    num_behind = max(0, rest - 1) if common in _FIRST_ONLY else 0
    reasons = {common: rest - num_behind, "queued": num_behind}
    for each in held.values():
        kind = each.partition(":")[0]
        reasons[kind] = reasons.get(kind, 0) + 1
    return {reason: count for reason, count in reasons.items() if count}


def overtaken(
    step: UnfinishedStep, table: Mapping[str, TrackedRequest], max_loras: int
) -> list[TrackedRequest]:
    """Return those that came before a request that `step` admits for its priority, and wait.

    One that lacks a LoRA slot would have waited anyhow.
    """
    loaded = {adapter for row in step.rows if (adapter := _adapter_of(row[0]))}
    came = [(each.request_id, each.engine_request.priority) for each, _ in step.admitted]
    best = min((priority for _, priority in came), default=0)
    found = []
    for tracked in table.values():
        adapter, priority = _adapter_of(tracked), tracked.engine_request.priority
        if tracked.was_overtaken or tracked.block_table or priority <= best:
            continue
        if adapter and adapter not in loaded and len(loaded) >= max_loras:
            continue
        if any(later > tracked.request_id and first < priority for later, first in came):
            tracked.was_overtaken = True
            found.append(tracked)
    return found


def _adapter_of(tracked: TrackedRequest) -> int | None:
    adapter = getattr(tracked.engine_request, "lora_request", None)
    return None if adapter is None else int(adapter.lora_int_id)
