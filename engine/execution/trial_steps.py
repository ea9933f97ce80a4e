"""Steps of artificial requests, to test, time and warm up a runner."""

from collections.abc import Sequence

from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep


def trial_step(
    lengths: Sequence[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    token_ids: Sequence[int] | None = None,
) -> ScheduledStep:
    """Return a step of artificial requests. Every row samples a token.

    If there are fewer blocks than the requests need, they share blocks. That is harmless, because
    nobody needs the keys and values that they store.

    Args:
        lengths: for each request, its tokens before the step and its tokens in the step.
        token_ids: tokens of every prompt, at least as many as the longest needs. None: all token 0.
    """
    rows = []
    for i, (before, count) in enumerate(lengths):
        request = Request(
            request_id=-1 - i,
            prompt_token_ids=list((token_ids or [0] * (before + count))[: before + count]),
            sampling=SamplingParams(),
            arrival_ns=0,
        )
        held = -(-(before + count) // block_size)
        request.block_table = [(i * held + j) % num_blocks for j in range(held)]
        phase = Phase.DECODE if before and count == 1 else Phase.PREFILL
        rows.append(ScheduledRow(request, phase, before, count, True))
    return ScheduledStep(-1, rows)
