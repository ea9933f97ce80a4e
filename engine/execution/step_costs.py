"""Steps of artificial requests, and the time of steps on this machine, measured with them.

If other programs use the machine, the times include their load, as the first real steps will.
"""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase, StepCosts
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep

if TYPE_CHECKING:
    from stepscope.engine.execution.runner import ModelRunner


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


NUM_STREAMS = 8
CONTEXT_TOKENS = 512  # context length of each stream
PREFILL_TOKENS = 200  # of each of two prompts
# After this time, or so many runs, no kind of step is run again.
MEASURE_NS = 500_000_000
MOST_RUNS = 16


def measure(runner: "ModelRunner") -> StepCosts:
    """Time decodes of `NUM_STREAMS` requests and of one, and prefills of two prompts.

    The kinds take turns, so that a short disturbance slows down all of them, not one. Only the
    later half of their runs counts: before, caches and the number of threads settle.
    """
    context = max(1, min(CONTEXT_TOKENS, runner.max_model_len - 1))
    prefill = min(PREFILL_TOKENS, runner.max_model_len)
    kinds = [(context, 1)] * NUM_STREAMS, [(context, 1)], [(0, prefill)] * 2
    steps = [trial_step(each, runner.num_blocks, runner.block_size) for each in kinds]
    times_ns: list[list[int]] = []
    begin_ns = now_ns = runner.clock()
    while len(times_ns) < MOST_RUNS and (not times_ns or now_ns - begin_ns < MEASURE_NS):
        times_ns.append([])
        for step in steps:
            start_ns = now_ns
            runner.execute(step)
            now_ns = runner.clock()
            times_ns[-1].append(now_ns - start_ns)
    settled = zip(*times_ns[len(times_ns) // 2 :], strict=True)
    decode_ms, stream_ms, prefill_ms = (statistics.median(each) / 1e6 for each in settled)
    return StepCosts(
        num_streams=NUM_STREAMS,
        decode_ms=decode_ms,
        num_prefill_tokens=2 * prefill,
        prefill_ms=prefill_ms,
        stream_ms=stream_ms,
    )
