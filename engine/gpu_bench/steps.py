"""`EngineSide`: an open engine with a random model, and steps through its runner.

Made-up steps are those that the runner tries itself out with (`execution.trial_steps`): what they
leave in the KV cache belongs to nobody, so they run before any request does.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from stepscope.engine.config import EngineConfig, Knobs
from stepscope.engine.core import EngineCore
from stepscope.engine.execution.trial_steps import trial_step
from stepscope.engine.gpu_bench.bench import Bench
from stepscope.engine.gpu_bench.costs import Costs
from stepscope.engine.gpu_bench.results import Facts
from stepscope.engine.intake import Intake
from stepscope.engine.models.random_shapes import PREFIX, SHAPES
from stepscope.engine.runner import ModelRunner
from stepscope.engine.serve import open_engine

NUM_WARM_UPS = 3


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
        """What a reader has to know of the engine."""
        info = self.core.info
        return {
            "dtype": info.dtype,
            "implementation": info.implementation or "",
            "attention": info.attention_backend or "",
            "kv_tokens": self.runner.num_blocks * self.runner.block_size,
        }


class StepTimes(NamedTuple):
    """Milliseconds of the same step again and again."""

    step_ms: list[float]  # from laying out the batch to its tokens on the host
    device_ms: list[float]  # of the forward pass by CUDA events; empty on a CPU
    num_padded_tokens: int


@contextlib.contextmanager
def engine_side(bench: Bench, model: str, *, dtype: str = "auto") -> Iterator[EngineSide]:
    """An engine as `stepscope serve` has it, with room for the longest step of the parts."""
    sizes = bench.sizes
    config = EngineConfig(
        model=PREFIX + model,
        device=str(bench.device),
        dtype=dtype,  # type: ignore[arg-type]
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
    """Run the step with (tokens before, tokens in it) of each request; ends when time is up."""
    step = trial_step(lengths, runner.num_blocks, runner.block_size)
    for _ in range(NUM_WARM_UPS):
        result = runner.execute(step)
    step_ms, device_ms = [], []
    for _ in range(num_samples):
        start_ns = runner.clock()
        result = runner.execute(step)
        step_ms.append((runner.clock() - start_ns) / 1e6)
        if result.device_ns is not None:
            device_ms.append(result.device_ns / 1e6)
        if bench.left_s <= 0:
            break
    return StepTimes(step_ms, device_ms, result.num_padded_tokens)
