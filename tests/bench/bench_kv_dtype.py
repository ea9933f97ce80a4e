"""What a smaller KV cache costs in accuracy, and what it does to the time of a decode step.

    python tests/bench/bench_kv_dtype.py [--dtype bfloat16] [--contexts 512 4096]

Accuracy: the logits before each of 1,000 tokens of prose, against those of the same model with a
cache in its own dtype: the error over the spread of the logits (root mean squares), and the share
of tokens whose most likely successor is the same. `bf16 model` beside a model in fp32 is what its
own rounding costs, for scale. Speed: decode steps of several requests at long contexts, in turns of
one run, medians. The model is SmolLM2 where it has been fetched, else the demo model.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import platformdirs
import torch

from stepscope.engine.bench.throughput import describe_machine
from stepscope.engine.execution.loading import load_runner
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.execution.step_costs import trial_step
from stepscope.engine.models.cache import smollm2
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.workload.arrivals import Corpus

NUM_TOKENS = 1_000
CONTEXTS = (512, 2_048, 8_000)
BATCH = 4
KV_DTYPES = ("auto", "bf16", "fp8_e4m3")


def load(model: str, dtype: str, kv_dtype: str) -> ModelRunner:
    config = EngineConfig(
        model=model,
        dtype=dtype,  # type: ignore[arg-type]
        kv_cache_dtype=kv_dtype,  # type: ignore[arg-type]
        kv_memory="2GB",
        seq_capacity=BATCH,
        device="cpu",
    )
    return load_runner(config, lambda what, share: None)


def logits_of_prose(runner: ModelRunner) -> torch.Tensor:
    """[NUM_TOKENS, vocab_size], each from all tokens before it, in chunks of 128."""
    text = Corpus.english().passage(0, 8 * NUM_TOKENS)
    tokens = runner.tokenizer.encode(text)[:NUM_TOKENS]
    assert len(tokens) == NUM_TOKENS
    seen: list[torch.Tensor] = []
    forward = runner._model.forward

    def every_position(
        input_ids: torch.Tensor, positions: torch.Tensor, context: Any, logits_of: torch.Tensor
    ) -> torch.Tensor:
        logits = forward(input_ids, positions, context, torch.arange(len(input_ids)))
        seen.append(logits.float())
        return logits[logits_of]

    runner._model.forward = every_position  # type: ignore[method-assign]
    for start in range(0, NUM_TOKENS, 128):
        count = min(128, NUM_TOKENS - start)
        runner.execute(trial_step([(start, count)], runner.num_blocks, runner.block_size, tokens))
    runner._model.forward = forward  # type: ignore[method-assign]
    return torch.cat(seen)


def accuracy(model: str, dtype: str) -> None:
    exact = logits_of_prose(load(model, dtype, "auto"))
    others = [(f"{kv} cache", dtype, kv) for kv in KV_DTYPES[1:]]
    if dtype == "float32":
        others.append(("bf16 model", "bfloat16", "auto"))
    for name, other_dtype, kv_dtype in others:
        logits = logits_of_prose(load(model, other_dtype, kv_dtype))
        spread = (exact - exact.mean(-1, keepdim=True)).square().mean().sqrt()
        error = float((logits - exact).square().mean().sqrt() / spread)
        same = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        print(
            f"  {name:15} logits off by {error:.2%} of their spread, "
            f"most likely token the same: {same:.1%}"
        )


def speed(model: str, dtype: str, contexts: list[int], repeat: int) -> None:
    runners = {kv: load(model, dtype, kv) for kv in KV_DTYPES}
    print(f"a decode step of {BATCH} requests, ms     " + "".join(f"{kv:>12}" for kv in KV_DTYPES))
    for context in contexts:
        times: dict[str, list[float]] = {kv: [] for kv in runners}
        for _ in range(repeat):
            for kv, runner in runners.items():
                lengths = [(context, 1)] * BATCH
                step = trial_step(lengths, runner.num_blocks, runner.block_size)
                start = time.perf_counter()
                runner.execute(step)
                times[kv].append(1e3 * (time.perf_counter() - start))
        cells = "".join(f"{statistics.median(each):12.2f}" for each in times.values())
        print(f"  {context:6} tokens each              {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    fetched = Path(platformdirs.user_cache_dir("stepscope"), smollm2.VERSION).is_dir()
    parser.add_argument("--model", default=smollm2.NAME if fetched else "demo")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()

    machine = describe_machine()
    print(f"{machine.cpu}, {machine.num_cores} cores")
    print(f"{options.model} in {options.dtype}, {NUM_TOKENS} tokens of prose")
    accuracy(options.model, options.dtype)
    speed(options.model, options.dtype, options.contexts, options.repeat)


if __name__ == "__main__":
    main()
