"""(b) Decode steps, (c) prefill steps, (d) steps of more and more tokens, through the runner."""

from collections.abc import Sequence

from stepscope.engine.bench.gpu.measure.bench import Bench
from stepscope.engine.bench.gpu.measure.steps import EngineSide, time_steps


def measure_decode(bench: Bench, engine: EngineSide) -> None:
    """(b) Every batch over every context; the floor is the bytes that have to be read."""
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
                # Above this, requests read blocks of one another: as many bytes, and far apart.
                has_shared_blocks=batch * -(-context // engine.runner.block_size)
                > engine.runner.num_blocks,
            )


def measure_prefill(bench: Bench, engine: EngineSide) -> None:
    """(c) One prompt in one step; the floor is its operations."""
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
    """(d) The beginning of one prompt, in steps of more and more tokens."""
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
