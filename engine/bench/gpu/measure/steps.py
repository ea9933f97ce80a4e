"""`EngineSide`: an open engine with a random model, and timed steps through its runner.

The steps are the trial steps of `execution.trial_steps`. They overwrite KV blocks without
allocating them, so they must run before the engine gets its first request.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from stepscope.engine.bench.gpu.costs import Costs
from stepscope.engine.bench.gpu.measure.bench import Bench
from stepscope.engine.bench.gpu.results import Facts
from stepscope.engine.control.intake import Intake
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.execution.trial_steps import trial_step
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.models.random_shapes import PREFIX, SHAPES
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Knobs

NUM_WARM_UPS = 2
NUM_ALONE = 3
# Long steps need fewer samples: stop after this many seconds with this many samples.
ENOUGH_S, ENOUGH_SAMPLES = 2.0, 5


class EngineSide(NamedTuple):
    model: str
    core: EngineCore
    intake: Intake
    vocab_size: int
    costs: Costs

    @property
    def runner(self) -> ModelRunner:
        return cast(ModelRunner, self.core.runner)

    def settings(self) -> Facts:
        """Return the settings of the engine that the report shows."""
        info = self.core.info
        return {
            "dtype": info.dtype,
            "implementation": info.implementation or "",
            "attention": info.attention_backend or "",
            "overlap": self.core.overlap,
            "kv_tokens": self.runner.num_blocks * self.runner.block_size,
        }


class StepTimes(NamedTuple):
    """Milliseconds of one step, run several times."""

    step_ms: list[float]  # from one step's tokens to the next step's, with two steps in flight
    alone_ms: list[float]  # from laying out the step to its tokens, with no other step in flight
    device_ms: list[float]  # of the forward pass by CUDA events; empty on a CPU
    num_padded_tokens: int


@contextlib.contextmanager
def engine_side(bench: Bench, model: str) -> Iterator[EngineSide]:
    """Open an engine as in `stepscope serve`, with room for the longest step of all parts."""
    sizes = bench.sizes
    config = EngineConfig(
        model=PREFIX + model,
        device=str(bench.device),
        max_model_len=sizes.max_model_len,
        token_capacity=sizes.max_model_len,
        seq_capacity=sizes.seq_capacity,
        kv_memory=sizes.kv_memory,
    )
    knobs = Knobs(max_num_batched_tokens=sizes.budget, max_num_seqs=sizes.seq_capacity)

    def progress(what: str, share: float) -> None:
        bench.doing(f"{what} {share:.0%}" if share else what)

    with open_engine(config, knobs, progress=progress) as (core, intake, vocab_size):
        itemsize = cast(ModelRunner, core.runner).dtype.itemsize
        yield EngineSide(model, core, intake, vocab_size, Costs.of(SHAPES[model], itemsize))


def time_steps(
    bench: Bench, runner: ModelRunner, lengths: Sequence[tuple[int, int]], num_samples: int
) -> StepTimes:
    """Time one step, repeatedly. Ends early when the part's time is up.

    Args:
        lengths: for each request, its tokens before the step and its tokens in the step.

    Raises:
        MemoryError: the whole step does not fit in memory.
    """
    step = trial_step(lengths, runner.num_blocks, runner.block_size)
    step_ms, alone_ms, device_ms = [], [], []
    for number in range(NUM_WARM_UPS + NUM_ALONE):
        start_ns = runner.clock()
        result = runner.execute(step)
        if result.num_tokens_fit is not None:
            raise MemoryError(f"out of memory: of the step only {result.num_tokens_fit} tokens fit")
        if number >= NUM_WARM_UPS:
            alone_ms.append((runner.clock() - start_ns) / 1e6)
    running = runner.launch(step)
    before_ns = None
    for _ in range(num_samples + 1):
        following = runner.launch(step)
        result = running.collect()
        running = following
        now_ns = runner.clock()
        if before_ns is not None:
            step_ms.append((now_ns - before_ns) / 1e6)
            if result.device_ns is not None:
                device_ms.append(result.device_ns / 1e6)
        before_ns = now_ns
        is_enough = len(step_ms) >= ENOUGH_SAMPLES and sum(step_ms) > ENOUGH_S * 1e3
        if is_enough or (step_ms and bench.left_s <= 0):
            break
    running.collect()
    return StepTimes(step_ms, alone_ms, device_ms, result.num_padded_tokens)
