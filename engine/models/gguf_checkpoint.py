"""Converts a GGUF file once into a checkpoint in the user's cache: config, safetensors, tokenizer.

Converts only the Llama architecture, with the tensor types that the `gguf` package can dequantise.
Quantised weights become bf16, which is more precise than they were; all others keep their type.

RoPE in llama.cpp rotates neighbouring values of a head; in transformers it rotates values half a
head apart. So llama.cpp's conversion (`convert_hf_to_gguf.py`, `permute`) reorders the rows of Q
and K. This module restores their order.

The byte-level BPE tokenizer becomes files that transformers reads.
"""

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from stepscope.engine.models.cached_folder import Check, ensure
from stepscope.engine.protocol.knobs import ConfigError

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>")


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer and its chat template, if there is one, to `folder`.

    Raises:
        ConfigError: the tokenizer is not one that we can convert.
        KeyError: a field is missing.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    kind, splits = fields[f"{_PREFIX}model"], fields.get(f"{_PREFIX}pre")
    if kind != "gpt2":
        why = f"its tokenizer is of the kind {kind!r}; only 'gpt2' is converted"
        raise ConfigError("gguf_tokenizer", why)
    tokens: list[str] = fields[f"{_PREFIX}tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields[f"{_PREFIX}merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(splits)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields[f"{_PREFIX}token_type"], strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            is_special = token_type == _CONTROL
            added = [AddedToken(token, special=is_special, normalized=False)]
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: fields.get(f"{_PREFIX}{theirs}_token_id") for ours, theirs in names.items()}
    special = {f"{ours}_token": tokens[each] for ours, each in ids.items() if each is not None}
    if fields.get(f"{_PREFIX}add_bos_token", False):
        first = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, ids["bos"])]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=fields.get("tokenizer.chat_template"),
        **special,
    ).save_pretrained(folder)


def end_tokens(fields: Mapping[str, Any]) -> list[int]:
    """Return every token that ends a text or a turn: named ones, and control tokens by text."""
    named = (fields.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = zip(fields[f"{_PREFIX}tokens"], fields[f"{_PREFIX}token_type"], strict=True)
    ends = (i for i, each in enumerate(tokens) if each[0] in _END_TEXTS and each[1] == _CONTROL)
    return sorted({*ends, *(token_id for token_id in named if token_id is not None)})


def _pre_tokenizer(splits: str | None) -> Any:
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splits == "gpt-2":
        return words
    if splits == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    why = f"its tokenizer splits text by {splits!r}; only 'gpt-2' and 'smollm' are converted"
    if splits is None:
        why = f"it does not say how its tokenizer splits text ({_PREFIX}pre)"
    raise ConfigError("gguf_tokenizer", why)


SUFFIX = ".gguf"
VERSION = "v2"  # part of the folder's name; change it with the conversion

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What is read of the file, and what changes no result.
_READ = frozenset(
    f"llama.{key}"
    for key in (
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.layer_norm_rms_epsilon", "attention.value_length", "block_count",
        "context_length", "embedding_length", "feed_forward_length", "rope.dimension_count",
        "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned",
        "rope.scaling.original_context_length", "rope.scaling.type", "tensor_data_layout",
        "vocab_size",
    )
)  # fmt: skip
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def checkpoint_of(file: Path, progress: Callable[[str, float], None], check: Check) -> Path:
    """Return the folder of the checkpoint made from `file`, converted if it is not there yet."""
    try:
        stat = file.stat()
    except OSError as error:
        raise ConfigError("no_model", f"{file} cannot be read: {error.strerror}") from None
    # Not a hash of its content: reading gigabytes at each start takes longer than the start.
    key = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    name = f"gguf-{VERSION}-{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return ensure(
        name,
        f"the checkpoint made of {file.name}",
        lambda folder: write(file, folder, progress),
        check,
    )


def write(file: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Convert `file` into a checkpoint in the new folder `folder`.

    Raises:
        ConfigError: the file is damaged, has another architecture or tensors that we cannot
            convert.
        OSError: the folder cannot be written.
    """
    gguf = package()
    try:
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # noqa: BLE001 - a damaged file may cause any error
        _refuse(f"{file} is no GGUF file, or was cut short", error)
    if (number := fields.get("split.count", 1)) > 1:
        part = fields.get("split.no", 0) + 1
        raise ConfigError(
            "gguf_split",
            f"{file} is part {part} of {number} of a model: join them with "
            "'llama-gguf-split --merge'",
        )
    try:
        config = _config(fields, reader.tensors)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        write_tokenizer(fields, folder)
        _write_weights(gguf, reader.tensors, config, folder, progress)
    except ConfigError as error:
        raise ConfigError(error.code, f"{file} cannot be served: {error}") from None
    except OSError:
        raise
    except KeyError as error:
        raise ConfigError("bad_gguf", f"{file} lacks the field {error}: copy it again") from None
    except Exception as error:  # noqa: BLE001 - the Rust libraries raise plain Exception
        _refuse(f"{file} cannot be converted", error)


def _refuse(what: str, error: Exception) -> NoReturn:
    detail = " ".join(str(error).split()) or type(error).__name__
    raise ConfigError("bad_gguf", f"{what}: {detail}") from error


def package() -> Any:
    """Import and return the package `gguf`. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConfigError(
            "no_gguf", "a GGUF file needs the package gguf: pip install 'stepscope[gguf]'"
        ) from None


def _config(fields: Mapping[str, Any], tensors: Any) -> dict[str, Any]:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ConfigError(
            "gguf_architecture", f"its architecture is {architecture!r}; only 'llama' is converted"
        )
    unread = [key for key in fields if key.startswith("llama.") and key not in _READ]
    told = [key for key in unread if fields[key] not in (None, False, 0, "", "none")]
    if told:
        raise ConfigError("gguf_key", f"its key {told[0]}={fields[told[0]]!r} is not converted")
    for key, value in fields.items():
        if key.startswith("llama.") and isinstance(value, list):
            raise ConfigError("gguf_key", f"it has a value of {key} for each layer")
    shapes = {tensor.name: tensor.shape.tolist() for tensor in tensors}
    hidden_size = fields["llama.embedding_length"]
    num_heads = fields["llama.attention.head_count"]
    head_dim = fields.get("llama.attention.key_length", hidden_size // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise ConfigError("gguf_key", f"its {key} is {fields[key]}, and its heads {head_dim}")
    kind = fields.get("llama.rope.scaling.type", "linear")
    factor = fields.get("llama.rope.scaling.factor", fields.get("llama.rope.scale_linear", 1.0))
    if kind != "none" and (kind != "linear" or factor not in (0.0, 1.0)):
        why = f"its positions are scaled ({kind}, {factor:g}), which is not converted"
        raise ConfigError("gguf_rope", why)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        },
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": shapes["token_embd.weight"][1],  # GGUF names the innermost size first
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(fields),
    }


def _write_weights(
    gguf: Any,
    tensors: Any,
    config: Mapping[str, Any],
    folder: Path,
    progress: Callable[[str, float], None],
) -> None:
    import torch
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    types = {
        gguf.GGMLQuantizationType.F32: torch.float32,
        gguf.GGMLQuantizationType.F16: torch.float16,
    }
    weights = {}
    for i, tensor in enumerate(tensors):
        progress("converting the GGUF file, once", i / len(tensors))
        name, part = _name_of(tensor.name)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ConfigError(
                "gguf_type",
                f"the gguf package cannot dequantise {tensor.tensor_type.name} ({tensor.name})",
            ) from None
        if part in heads:
            # [num_heads * head_dim, hidden_size], from llama.cpp's order of rows
            pairs = values.reshape(heads[part], -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        dtype = types.get(tensor.tensor_type, torch.bfloat16)
        # Copied, because `values` may be a view of the file.
        weights[name] = torch.tensor(values, dtype=dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _name_of(tensor: str) -> tuple[str, str]:
    """Return a GGUF tensor's name in a transformers checkpoint, and its name within its layer."""
    if tensor in _NAMES:
        return _NAMES[tensor], ""
    found = _LAYER_TENSOR.fullmatch(tensor)
    if found is None or found[2] not in _LAYER_NAMES:
        raise ConfigError("gguf_tensor", f"its tensor {tensor} is none of a plain Llama model")
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.weight", found[2]
