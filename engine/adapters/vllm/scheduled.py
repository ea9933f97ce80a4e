"""What vLLM has scheduled for a step: the blocks that requests received, and a row for each."""

from collections.abc import Collection, Mapping

from stepscope.engine.adapters.attached.rows import DECODE, encode_rows, fields_of
from stepscope.engine.adapters.attached.tracked import TrackedRequest
from stepscope.engine.adapters.attached.unfinished_step import Taken, UnfinishedStep
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.shapes import SchedulerOutput
from stepscope.engine.protocol.wire import Phase


def note_blocks(
    step: UnfinishedStep,
    out: SchedulerOutput,
    table: Mapping[str, TrackedRequest],
    block_size: int,
) -> None:
    """Add to `step` the admitted requests, and the blocks that requests received.

    They are in vLLM's order: it gives blocks to running requests first.
    """
    again = out.scheduled_cached_reqs
    resumed = versions.resumed(again)
    for i, block_ids in enumerate(again.new_block_ids):
        if block_ids is None:
            continue
        name = again.req_ids[i]
        tracked = table[name]
        if name in resumed:
            step.resume(tracked)
            _admit(step, tracked, block_ids, again.num_computed_tokens[i], block_size)
        else:
            blocks = _own_ids(block_ids)
            tracked.block_table.extend(blocks)
            step.taken.append(Taken(tracked, blocks, 0))
    for new in out.scheduled_new_reqs:
        tracked = table[new.req_id]
        if tracked.was_preempted:  # vLLM's second model runner reports resumed requests as new
            step.resume(tracked)
        tracked.num_loaded = versions.num_loaded(out, tracked.source)
        _admit(step, tracked, new.block_ids, new.num_computed_tokens, block_size)


def make_rows(
    step: UnfinishedStep, out: SchedulerOutput, table: Mapping[str, TrackedRequest]
) -> None:
    """Fill in `rows`, `batch` and `num_prefill_tokens` of `step`. Call `note_blocks` first."""
    rows, ordinary = step.rows, Phase.DECODE
    append = rows.append
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


def _admit(
    step: UnfinishedStep,
    tracked: TrackedRequest,
    block_ids: Collection[Collection[int]],
    num_cached: int,
    block_size: int,
) -> None:
    blocks = _own_ids(block_ids)
    tracked.was_overtaken = False
    tracked.block_table = blocks.copy()
    step.taken.append(Taken(tracked, blocks, num_cached // block_size))
    step.admitted.append((tracked, num_cached))


def _own_ids(block_ids: Collection[Collection[int]]) -> list[int]:
    """Return stepscope's ids of the blocks of all KV cache groups, without vLLM's null block."""
    return [block - 1 for group in block_ids for block in group if block]
