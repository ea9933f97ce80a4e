"""Steps of artificial requests, and the time of steps on this machine, measured with them.

If other programs use the machine, the times include their load, as the first real steps will.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stepscope.engine.protocol.settings.sampling_params import SamplingParams
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
# Time after which a kind of step is not run again.
DECODE_NS = 80_000_000
STREAM_NS = 40_000_000
PREFILL_NS = 200_000_000
LONG_NS = 1_000_000_000  # a kind of step that takes this long at first is not run again
MOST_RUNS = 16


def measure(runner: "ModelRunner") -> StepCosts:
    """Time decodes of `NUM_STREAMS` requests and of one, and prefills of two prompts."""
    context = max(1, min(CONTEXT_TOKENS, runner.max_model_len - 1))
    prefill = min(PREFILL_TOKENS, runner.max_model_len)

    def timed(lengths: list[tuple[int, int]]) -> Callable[[], int]:
        step = trial_step(lengths, runner.num_blocks, runner.block_size)

        def run() -> int:
            start_ns = runner.clock()
            runner.execute(step)
            return runner.clock() - start_ns

        return run

    decode_ms, stream_ms, prefill_ms = _typical_ms(
        (timed([(context, 1)] * NUM_STREAMS), DECODE_NS),
        (timed([(context, 1)]), STREAM_NS),
        (timed([(0, prefill)] * 2), PREFILL_NS),
    )
    return StepCosts(
        num_streams=NUM_STREAMS,
        decode_ms=decode_ms,
        num_prefill_tokens=2 * prefill,
        prefill_ms=prefill_ms,
        stream_ms=stream_ms,
    )


def _typical_ms(*kinds: tuple[Callable[[], int], int]) -> list[float]:
    """Return for each kind of step the median of the later half of its runs, in milliseconds.

    During the first half, the number of threads and the caches settle. The kinds take turns, so
    that a short disturbance slows down all of them, not one.

    `kinds`: for each kind, a function that runs a step and returns its time, and the total time
    after which to stop, both in nanoseconds.
    """
    times_ns = [[run()] for run, _ in kinds]
    is_going = True
    while is_going:
        is_going = False
        for (run, allowed_ns), taken_ns in zip(kinds, times_ns, strict=True):
            is_short = taken_ns[0] < LONG_NS and len(taken_ns) < MOST_RUNS
            if is_short and sum(taken_ns[1:]) < allowed_ns:
                taken_ns.append(run())
                is_going = True
    return [statistics.median(taken_ns[len(taken_ns) // 2 :]) / 1e6 for taken_ns in times_ns]
