"""The lean decoder equals transformers' own modules for every kind of layer it has.

test_exactness.py compares whole generations; these tests compare logits over many configs.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stepscope.engine.models import loader
from stepscope.engine.models.loader import Model
from stepscope.engine.protocol.engine_config import ModelImpl
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.kernels.paged_attention import LayerCache, PagedBatch, StepContext
from stepscope.kernels.reference import ReferenceAttention
from tests.support.cpu_levels import EACH_LEVEL, highest_level, linear_layouts

MAX_MODEL_LEN = 128
BLOCK_SIZE = 8
TOKENS = tuple((7 * i * i + 3 * i) % 250 for i in range(90))


def quiet(what: str, share: float) -> None:
    return


def load(folder: Path, model_impl: ModelImpl = "lean", dtype: torch.dtype = torch.float32) -> Model:
    config = loader.load_config(folder, "it")
    device = torch.device("cpu")
    return loader.load_model(folder, "it", config, model_impl, MAX_MODEL_LEN, dtype, device, quiet)


class Pages:
    """A KV cache for one request, and the steps over it."""

    def __init__(self, model: Model) -> None:
        shape = model.kv_shape
        size = (MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.model = model
        zeros = partial(torch.zeros, size, dtype=model.dtype)
        self.caches = [LayerCache(zeros(), zeros()) for _ in range(shape.num_layers)]
        self.num_computed = 0
        # Neighbours in the request are not neighbours in the cache.
        self.table = (np.arange(size[0]) * 5) % size[0]

    @torch.inference_mode()
    def step(self, num_tokens: int, logits_of: list[int]) -> torch.Tensor:
        start, end = self.num_computed, self.num_computed + num_tokens
        positions = np.arange(start, end)
        slots = self.table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = PagedBatch(
            query_starts=np.array([0, num_tokens]),
            context_lens=np.array([end]),
            block_tables=self.table[None],
            slot_mapping=torch.from_numpy(slots),
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
        )
        self.num_computed = end
        return self.model.forward(
            torch.tensor(TOKENS[start:end]),
            torch.from_numpy(positions),
            StepContext(batch, self.caches, ReferenceAttention()),
            torch.tensor(logits_of, dtype=torch.int64),
        )


@torch.inference_mode()
def oracle_logits(folder: Path) -> torch.Tensor:
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return oracle.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def rope(kind: str, **settings: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"]}
VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    ("llama", rope("linear", factor=2.0)),
    ("llama", rope("llama3", factor=8.0, **LLAMA3)),
    ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, **LAYERS}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=str)
def test_lean_decoder_logits_equal_those_of_transformers_in_chunks_and_decodes(
    tiny_checkpoint: Callable[..., Path], family: str, changes: dict[str, object]
) -> None:
    folder = tiny_checkpoint(family, **changes)
    pages = Pages(load(folder))
    got = [pages.step(count, list(range(count))) for count in (40, 30, *[1] * 20)]
    assert_near(torch.cat(got), oracle_logits(folder))


def test_logits_of_selected_tokens_equal_those_of_all_tokens(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    # The last layer computes only the requested rows; keys and values are complete all the same.
    model = load(tiny_checkpoint("qwen3"))
    every, some = Pages(model), Pages(model)
    chunk = every.step(50, list(range(50)))
    assert some.step(30, []).shape == (0, model.vocab_size)
    assert_near(some.step(20, [4, 19]), chunk[[34, 49]])
    assert_near(some.step(1, [0]), every.step(1, [0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_packed_only_if_the_processor_has_the_instructions(
    tiny_checkpoint: Callable[..., Path], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen2")
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    expected = None
    for layout in linear_layouts(dtype, monkeypatch):
        model = load(folder, dtype=dtype)
        assert model.implementation == f"stepscope decoder, {layout} weights"
        logits = Pages(model).step(60, [3, 59])
        if expected is not None:
            torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
        expected = logits


@EACH_LEVEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_plain_torch_at_each_level_of_the_compiled_kernels(
    tiny_checkpoint: Callable[..., Path], level: str, dtype: torch.dtype
) -> None:
    found = []
    for highest in (level, "none"):
        with highest_level(highest):
            model = load(tiny_checkpoint("qwen3"), dtype=dtype)
            pages = Pages(model)
            found.append(torch.cat([pages.step(60, [3, 59]), pages.step(1, [0])]))
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_model_figures_are_equal_for_the_lean_decoder_and_transformers(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        folder = tiny_checkpoint(family)
        lean, library = load(folder), load(folder, "transformers")
        assert library.implementation == "transformers modules"
        for name in ("architecture", "vocab_size", "num_parameters", "flops_per_token", "kv_shape"):
            assert getattr(lean, name) == getattr(library, name), (family, name)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", {}, "'gemma3_text' is none of llama, mistral, qwen2, qwen3"),
        ("llama", {"hidden_act": "gelu"}, "its activation is 'gelu', not 'silu'"),
    ],
)
def test_models_unfit_for_the_lean_decoder_run_in_transformers_unless_lean_is_set(
    tiny_checkpoint: Callable[..., Path], family: str, changes: dict[str, object], reason: str
) -> None:
    folder = tiny_checkpoint(family, **changes)
    assert load(folder, "auto").implementation == "transformers modules"
    with pytest.raises(ConfigError, match="use --model-impl auto") as refused:
        load(folder, "lean")
    assert reason in str(refused.value)


def test_a_checkpoint_with_other_tensor_names_runs_in_transformers(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_of(tiny_checkpoint("llama", tie_word_embeddings=True), tmp_path)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder, "auto").implementation == "transformers modules"
    with pytest.raises(ConfigError, match="lack 20 tensors"):
        load(folder, "lean")


def test_the_last_position_of_the_longest_request_can_be_computed(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    pages = Pages(load(tiny_checkpoint("llama")))
    pages.num_computed = MAX_MODEL_LEN - len(TOKENS)
    assert pages.step(1, [0]).isfinite().all()


# What a checkpoint says that its family does not read, or says twice.

FOREIGN: list[tuple[str, dict[str, object]]] = [
    ("llama", {"sliding_window": 8}),
    ("llama", {"sliding_window": 8, "use_sliding_window": True}),
    ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}),
    ("llama", {"layer_types": ["linear_attention"] * 2}),
    ("llama", {"max_window_layers": 1, "no_rope_layers": [0, 1]}),
    ("llama", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    ("llama", {"query_pre_attn_scalar": 400, "logit_scale": 0.1, "residual_multiplier": 0.2}),
    ("llama", {"use_qk_norm": True, "clip_qkv": 0.1}),
    ("mistral", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"use_sliding_window": False}),
    ("mistral", {"layer_types": ["full_attention"] * 2}),
    ("qwen2", {"attention_bias": False, "mlp_bias": True}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": False}),
    ("qwen3", {"mlp_bias": True, "attn_logit_softcapping": 5.0}),
]


@pytest.mark.parametrize(("family", "foreign"), FOREIGN, ids=str)
def test_a_family_reads_its_own_keys_only(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, foreign: dict[str, object]
) -> None:
    folder = copy_of(tiny_checkpoint(family), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **foreign}))
    assert_near(Pages(load(folder, "auto")).step(90, list(range(90))), oracle_logits(folder))


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **changes}, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_head_of_its_own_counts_though_the_config_ties_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_of(tiny_checkpoint("llama", tie_word_embeddings=True), tmp_path)
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    same = Pages(load(folder, "auto")).step(20, list(range(20)))
    change_weights(folder, **{"lm_head.weight": embeddings.clone()})
    assert torch.equal(Pages(load(folder)).step(20, list(range(20))), same)
    change_weights(folder, **{"lm_head.weight": embeddings.flip(0).contiguous()})
    model = load(folder)
    assert_near(Pages(model).step(90, list(range(90))), oracle_logits(folder))
    assert "stepscope decoder" in model.implementation


@pytest.mark.parametrize(
    ("family", "tensor", "shape"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias", (64,)),
        ("llama", "model.layers.1.self_attn.q_norm.weight", (16,)),
        ("llama", "model.layers.2.input_layernorm.weight", (64,)),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias", (64,)),
        ("qwen3", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64)),
        ("gemma2", "model.layers.0.mlp.up_proj.bias", (96,)),
    ],
)
def test_a_tensor_that_the_config_has_no_place_for_is_named_and_refused(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    tensor: str,
    shape: tuple[int, ...],
) -> None:
    folder = copy_of(tiny_checkpoint(family), tmp_path)
    change_weights(folder, **{tensor: torch.ones(shape)})
    with pytest.raises(ConfigError, match=tensor):
        load(folder, "auto")


def test_tensors_that_the_config_gives_anyway_are_no_reason_to_refuse(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copy_of(tiny_checkpoint("llama"), tmp_path)
    change_weights(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert load(folder).num_parameters
