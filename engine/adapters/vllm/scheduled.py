"""What vLLM has scheduled for a step: the blocks that requests received, and a row for each."""

from collections.abc import Mapping, Sequence

from stepscope.engine.adapters.attached.rows import DECODE, encode_rows, fields_of
from stepscope.engine.adapters.attached.tracked import Taken, TrackedRequest, UnfinishedStep
from stepscope.engine.adapters.vllm.kv_blocks import BlockHolders
from stepscope.engine.adapters.vllm.versions import SchedulerOutput
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
            step.resume(tracked)
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
            continue
        fields = fields_of(step, tracked, start, num_tokens, len(tracked.block_table))
        num_drafted = len(drafts.get(name, ()))
        if num_drafted:
            step.drafted[tracked] = num_drafted
        if fields[1] != DECODE:
            step.num_prefill_tokens += num_tokens - num_drafted
        append((tracked, None, start, fields))
    encode_rows(step)
