"""Step time of a model: decode batches and prefill chunks, and the share attention takes of it.

    python tests/bench/bench_runner.py [--model demo] [--dtypes float32 bfloat16] [--context 512]

The numbers depend on the machine; compare rows of one run with each other.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

from stepscope.engine.execution.machine.environment import prepare_environment
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 1024, 4096])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    for dtype in options.dtypes:
        config = EngineConfig(
            model=options.model,
            dtype=dtype,
            device=options.device,
            threads=options.threads,
            seq_capacity=max(options.decodes) + 8,
        )
        prepare_environment(config)
        bench = Bench(config)
        print(f"\n{bench.title}\n{'step':>24} {'ms':>9} {'tokens/s':>10} {'attention':>10}")
        for n in options.decodes:
            bench.report(f"{n} decodes", n, 0, options)
        for n in options.chunks:
            bench.report(f"chunk of {n}", 0, n, options)
        for n in (128, 256):
            bench.report(f"8 decodes + {n}", 8, n, options)


class Bench:
    """A runner whose attention backend is timed."""

    def __init__(self, config: EngineConfig) -> None:
        from stepscope.engine.execution.loading import load_runner

        self.runner = load_runner(config, lambda what, share: None)
        self.block_size = config.block_size
        self.attention_ns = 0
        backend = self.runner._backend

        @functools.wraps(type(backend).__call__)
        def timed(*args: object, **kwargs: object) -> object:
            start_ns = time.perf_counter_ns()
            output = backend(*args, **kwargs)
            self.attention_ns += time.perf_counter_ns() - start_ns
            return output

        timed.name, timed.is_capturable = backend.name, backend.is_capturable
        self.runner._backend = timed
        d = self.runner.description
        self.title = f"{d.model} {d.dtype} on {d.device}, attention: {d.attention_backend}"

    def report(self, label: str, decodes: int, chunk: int, options: argparse.Namespace) -> None:
        rows = self._rows(decodes, chunk, options.context)
        step = ScheduledStep(0, rows)
        self.runner.execute(step)
        times, shares = [], []
        for _ in range(options.repeat):
            self.attention_ns = 0
            elapsed = _timed(lambda: self.runner.execute(step))
            times.append(elapsed)
            shares.append(self.attention_ns / elapsed)
        ms = statistics.median(times) / 1e6
        tokens = sum(row.num_tokens for row in rows)
        share = statistics.median(shares)
        print(f"{label:>24} {ms:9.2f} {tokens / ms * 1e3:10.0f} {share:10.0%}", flush=True)

    def _rows(self, decodes: int, chunk: int, context: int) -> list[ScheduledRow]:
        lengths = [(context - 1, 1)] * decodes + ([(0, chunk)] if chunk else [])
        rows, next_block = [], 0
        for i, (start, num_tokens) in enumerate(lengths):
            total = start + num_tokens
            request = Request(i, [(i + 7 * j) % 256 for j in range(total)], _greedy(), 0)
            num_blocks = -(-total // self.block_size)
            taken = range(next_block, next_block + num_blocks)
            # Neighbouring blocks of a request are not neighbours in memory, as in a busy engine.
            request.block_table = [(b * 127) % self.runner.num_blocks for b in taken]
            next_block += num_blocks
            phase = Phase.DECODE if num_tokens == 1 else Phase.PREFILL
            rows.append(ScheduledRow(request, phase, start, num_tokens, True))
        return rows


def _greedy() -> object:
    from stepscope.engine.protocol.settings.sampling_params import SamplingParams

    return SamplingParams()


def _timed(call: Callable[[], object]) -> int:
    start_ns = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start_ns


if __name__ == "__main__":
    main()
