"""A KV cache of another dtype than the model: it has more blocks, and exact tokens.

The tokens are those that follow from the rounded keys and values, with any prefill chunks.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.protocol.engine_config import KVCacheDtype
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request
from stepscope.kernels.dispatch.backends import BackendUnavailableError, choose
from stepscope.kernels.paged_attention import to_fp8
from tests.support.engines.tiny_runner import load_tiny, next_row, run_rows

MAX_MODEL_LEN = 256
NUM_OUTPUT = 8
PROMPT_LENGTHS = (5, 64, 101)


def load(folder: Path, kv_cache_dtype: KVCacheDtype, **settings: Any) -> ModelRunner:
    settings = {"kv_memory": "256KB", "kv_cache_dtype": kv_cache_dtype, **settings}
    return load_tiny(folder, **settings)


class RoundedCache(DynamicCache):
    """transformers' own cache, with keys and values rounded as in the cache of `runner`."""

    def __init__(self, runner: ModelRunner, kv_cache_dtype: KVCacheDtype) -> None:
        super().__init__()
        self._scales = runner._kv_scales
        self._is_fp8 = kv_cache_dtype == "fp8_e4m3"

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *others: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = []
        for i, heads in enumerate((key, value)):  # [1, kv heads, tokens, head_dim]
            if self._is_fp8:
                factor = self._scales[layer][2 + i]
                stored = to_fp8(heads[0].transpose(0, 1), factor).float() / factor[:, None]
                rounded.append(stored.transpose(0, 1)[None])
            else:
                rounded.append(heads.to(torch.bfloat16).float())
        return super().update(*rounded, layer, *others, **more)


def run(runner: ModelRunner, prompt: list[int], chunk: int) -> list[int]:
    """The greedy tokens after `prompt`, which is computed in chunks of at most `chunk` tokens."""
    request = Request(0, list(prompt), SamplingParams(max_tokens=NUM_OUTPUT), arrival_ns=0)
    request.block_table = random.Random(chunk).sample(
        range(runner.num_blocks), -(-(len(prompt) + NUM_OUTPUT) // runner.block_size)
    )
    while request.num_output_tokens < NUM_OUTPUT:
        run_rows(runner, [next_row(request, chunk)])
    return request.output_token_ids


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("llama", {"attention": "torch"}),
        ("gemma2", {"model_impl": "transformers"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_tokens_equal_those_of_a_model_with_rounded_keys_and_values(
    family: str,
    settings: dict[str, str],
    kv_cache_dtype: KVCacheDtype,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint(family)
    runner = load(folder, kv_cache_dtype, **settings)
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rng = random.Random(5)
    for length in PROMPT_LENGTHS:
        prompt = [rng.randrange(256) for _ in range(length)]
        generated = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length),
            past_key_values=RoundedCache(runner, kv_cache_dtype),
            max_new_tokens=NUM_OUTPUT,
            do_sample=False,
            eos_token_id=None,
        )
        expected = generated[0, length:].tolist()
        for chunk in (7, 64, MAX_MODEL_LEN):
            assert run(runner, prompt, chunk) == expected, f"{length} tokens in chunks of {chunk}"


def test_a_smaller_kv_dtype_fits_proportionally_more_blocks(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint("llama")
    runners = [load(folder, each) for each in ("auto", "bf16", "fp8_e4m3")]
    blocks = [runner.num_blocks for runner in runners]
    assert blocks == [blocks[0], 2 * blocks[0], 4 * blocks[0]]
    assert len({runner.kv_bytes for runner in runners}) == 1
    names = [runner.description["kv_cache_dtype"] for runner in runners]
    assert names == ["float32", "bfloat16", "float8_e4m3fn"]


def test_a_backend_that_reads_one_dtype_only_is_refused_with_the_reason() -> None:
    with pytest.raises(BackendUnavailableError, match="no KV cache in float8_e4m3fn for queries"):
        choose("flash-attn", "cuda", torch.bfloat16, torch.float8_e4m3fn)


def test_without_compiled_kernels_for_a_kv_dtype_a_cpu_uses_another_backend(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    runner = load(tiny_checkpoint("llama"), "fp8_e4m3", dtype="float16")
    assert runner.description["attention_backend"] == "torch"
    with pytest.raises(ConfigError, match="has float32 and bfloat16, not float16"):
        load(tiny_checkpoint("llama"), "fp8_e4m3", dtype="float16", attention="cpu")
