"""What steps cost on this machine, found out at the engine's start by running some.

The figures are of this moment: what else the machine does is in them, as it will be in the steps
of the first requests.
"""

import statistics
from collections.abc import Callable
from typing import Any, Protocol

from stepscope.engine.execution.trial_steps import trial_step
from stepscope.engine.protocol.wire import StepCosts
from stepscope.engine.scheduling.step import ScheduledStep

NUM_STREAMS = 8
CONTEXT_TOKENS = 512  # that each of the streams attends to
PREFILL_TOKENS = 200  # of each of two prompts
# Nanoseconds after which each kind of step is run no more.
DECODE_NS = 80_000_000
STREAM_NS = 40_000_000
PREFILL_NS = 200_000_000
LONG_NS = 1_000_000_000  # a model whose first step takes so long is not run a second time
MOST_RUNS = 16


class Trialled(Protocol):
    """The part of a runner that this needs."""

    num_blocks: int
    block_size: int
    max_model_len: int

    def execute(self, step: ScheduledStep) -> Any: ...

    def clock(self) -> int: ...


def measure(runner: Trialled) -> StepCosts:
    """Time a few decodes of `NUM_STREAMS` requests and of one, and prefills of two prompts.

    What they leave in the KV cache belongs to no request.
    """
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
    """Of each kind of step the median of the later half of its runs.

    By then the number of threads and the caches have settled. The kinds take turns, so that what
    else runs for a moment slows down all of them and not one.

    Args:
        kinds: what runs a step and says how long it took, and when to stop, both in nanoseconds.
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
