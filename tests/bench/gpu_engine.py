"""An open engine of `bench_gpu.py`; (b), (c), (d): trial steps through its runner.

They overwrite KV blocks without allocating them,
so they come before the engine's first request. The floor of a decode is the bytes it must read: all
weights once (not the embeddings, of which single rows are read) and the keys and values of all
contexts. The floor of a prefill is the operations it must compute, a multiplication and an addition
as two: the weights of the layers for every token, causal attention for every pair of a query and a
visible key, the head for the tokens with logits; what follows the attention of the last layer is
computed for those tokens only, too.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, cast

from gpu_bench import Bench

from stepscope.engine.control.intake import Intake
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.execution.step_costs import trial_step
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.models.made_checkpoints import RANDOM_PREFIX
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.simulation.model_shape import ModelShape, model_shape

Lengths = Sequence[tuple[int, int]]  # of each request: tokens before the step, tokens in the step
# Long steps need fewer samples: stop after this many seconds with this many samples.
ENOUGH_S, ENOUGH_SAMPLES = 2.0, 5


def decode_bytes(shape: ModelShape, batch: int, context: int) -> int:
    """The least bytes that a decode of `batch` requests of `context` tokens each reads, in bf16."""
    return int(shape.weight_bytes + batch * context * shape.kv_bytes_per_token)


def step_flops(shape: ModelShape, lengths: Lengths, num_logits: int) -> int:
    """The operations of a step that needs the logits of so many tokens."""
    layers = shape.attention_weights + shape.mlp_weights
    # Of these, those in the last layer after its attention.
    tail = (
        shape.num_heads * shape.head_dim * shape.hidden_size + shape.mlp_weights // shape.num_layers
    )
    pairs = sum(causal_pairs(before, count) for before, count in lengths)
    return (
        2 * (layers - tail) * sum(count for _, count in lengths)
        + attention_flops(pairs, shape.num_heads, shape.head_dim) * shape.num_layers
        + 2 * (tail + shape.head_weights) * num_logits
    )


def causal_pairs(before: int, count: int) -> int:
    """Pairs of one of `count` new queries and a key that it sees."""
    return count * before + count * (count + 1) // 2


def attention_flops(num_pairs: int, num_heads: int, head_dim: int) -> int:
    """The operations of one layer's two matrix products of attention (scores and values)."""
    return 4 * num_pairs * num_heads * head_dim


class EngineSide(NamedTuple):
    """An open engine with a random model."""

    core: EngineCore
    intake: Intake
    vocab_size: int
    shape: ModelShape

    @property
    def runner(self) -> ModelRunner:
        return cast(ModelRunner, self.core.runner)


@contextlib.contextmanager
def opened(config: EngineConfig, knobs: Knobs) -> Iterator[EngineSide]:
    with open_engine(config, knobs, progress=lambda what, share: None) as (core, intake):
        yield EngineSide(core, intake, intake.vocab_size, model_shape(config.model))


@contextlib.contextmanager
def engine_side(bench: Bench, model: str) -> Iterator[EngineSide]:
    """Open an engine as in `stepscope serve`, with room for the longest step of all parts."""
    sizes = bench.sizes
    config = EngineConfig(
        model=RANDOM_PREFIX + model,
        device=str(bench.device),
        max_model_len=sizes.max_model_len,
        token_capacity=sizes.max_model_len,
        seq_capacity=sizes.seq_capacity,
        kv_memory=sizes.kv_memory,
    )
    knobs = Knobs(max_num_batched_tokens=sizes.budget, max_num_seqs=sizes.seq_capacity)
    with opened(config, knobs) as engine:
        info = engine.core.info
        bench.common_settings = {
            "dtype": info.dtype,
            "implementation": info.implementation or "",
            "attention": info.attention_backend or "",
            "overlap": engine.core.overlap,
            "kv_tokens": engine.runner.num_blocks * engine.runner.block_size,
        }
        yield engine


# (b), (c), (d): steps


def measure_decode(bench: Bench, engine: EngineSide) -> None:
    runner = engine.runner
    for context, batch in product(bench.sizes.contexts, bench.sizes.batches):
        # With too few blocks, requests share some. They still read as many bytes.
        shares = batch * -(-context // runner.block_size) > runner.num_blocks
        floor = decode_bytes(engine.shape, batch, context)
        facts = {"batch": batch, "context": context, "floor_bytes": floor}
        lengths = [(context - 1, 1)] * batch
        what = f"batch {batch}, context {context}"
        _measure_step(bench, engine, what, lengths, **facts, has_shared_blocks=shares)


def measure_prefill(bench: Bench, engine: EngineSide) -> None:
    for count in bench.sizes.prefills:
        facts = {"tokens": count, "floor_flops": step_flops(engine.shape, [(0, count)], 1)}
        _measure_step(bench, engine, f"{count} tokens", [(0, count)], **facts)


def measure_curve(bench: Bench, engine: EngineSide) -> None:
    for count in bench.sizes.curve:
        _measure_step(bench, engine, f"{count} tokens", [(0, count)], tokens=count)


def _measure_step(
    bench: Bench, engine: EngineSide, what: str, lengths: Lengths, **facts: int | bool
) -> None:
    with bench.attempt(what, **facts):
        samples, times = time_steps(bench, engine.runner, lengths)
        bench.found(what, samples, **times, **facts)


def time_steps(
    bench: Bench, runner: ModelRunner, lengths: Lengths
) -> tuple[list[float], dict[str, Any]]:
    """Time one step, repeatedly, in milliseconds.

    Returns:
        From one step's tokens to the next step's, with two steps in flight; and as facts the times
        with no other step in flight (`alone_ms`), and of the device by CUDA events, sampling
        included (`device_ms`).

    Raises:
        DeviceMemoryError: the whole step does not fit in memory.
    """
    step = trial_step(lengths, runner.num_blocks, runner.block_size)
    step_ms, alone_ms, device_ms = [], [], []
    for _ in range(5):
        start_ns = runner.clock()
        runner.execute(step)
        alone_ms.append((runner.clock() - start_ns) / 1e6)
    running = runner.launch(step)
    before_ns = None
    for _ in range(bench.sizes.num_samples + 1):
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
    return step_ms, {
        "device_ms": device_ms,
        "alone_ms": alone_ms[2:],  # two warm up
        "num_padded_tokens": result.num_padded_tokens,
    }
