"""Step times of the runner: (b) decode steps, (c) prefill steps, (d) steps of growing size."""

from collections.abc import Sequence

from stepscope.engine.bench.gpu.measure.bench import Bench
from stepscope.engine.bench.gpu.measure.steps import EngineSide, time_steps


def measure_decode(bench: Bench, engine: EngineSide) -> None:
    """(b) Time decode steps of every batch size and context length.

    The floor is the bytes to read.
    """
    bench.setting(**engine.settings())
    for context in bench.sizes.contexts:
        for batch in bench.sizes.batches:
            _measure(
                bench,
                engine,
                f"batch {batch}, context {context}",
                [(context - 1, 1)] * batch,
                batch=batch,
                context=context,
                floor_bytes=engine.costs.decode_bytes(batch, context),
                # With too few blocks, requests share some. They still read as many bytes.
                has_shared_blocks=batch * -(-context // engine.runner.block_size)
                > engine.runner.num_blocks,
            )


def measure_prefill(bench: Bench, engine: EngineSide) -> None:
    """(c) Time steps with one whole prompt each. The floor is the operations to compute."""
    bench.setting(**engine.settings())
    for count in bench.sizes.prefills:
        _measure(
            bench,
            engine,
            f"{count} tokens",
            [(0, count)],
            tokens=count,
            floor_flops=engine.costs.flops([(0, count)], num_logits=1),
        )


def measure_curve(bench: Bench, engine: EngineSide) -> None:
    """(d) Time steps with the first tokens of one prompt, for growing numbers of tokens."""
    bench.setting(**engine.settings())
    for count in bench.sizes.curve:
        _measure(bench, engine, f"{count} tokens", [(0, count)], tokens=count)


def _measure(
    bench: Bench,
    engine: EngineSide,
    what: str,
    lengths: Sequence[tuple[int, int]],
    **facts: int | bool,
) -> None:
    with bench.attempt(what, **facts):
        times = time_steps(bench, engine.runner, lengths, bench.sizes.num_samples)
        bench.found(
            what,
            times.step_ms,
            device_ms=times.device_ms,
            alone_ms=times.alone_ms,
            num_padded_tokens=times.num_padded_tokens,
            **facts,
        )
