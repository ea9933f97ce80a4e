"""Checkpoints that are made on this machine, once: the demo model, and `random:NAME`.

The demo model has Qwen3's architecture, 20 M parameters, one token a byte, and weights from a fixed
seed. It is untrained; with it, scheduling, KV cache and kernels do real work on a laptop without a
download.

A `random:NAME` has a well-known shape and no weight file. A folder with config, tokenizer and the
marker file `RANDOM` takes the place of the checkpoint; `RandomWeights` takes the place of its
weights. Such a model is as fast as a real one of its shape, but its output is noise.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.engine.models import cached_folder
from stepscope.engine.models.cached_folder import Check
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.simulation.model_shape import KNOWN_MODELS
from stepscope.engine.text.tokenizer import BYTE_OF_SYMBOL

# Part of the folder's name; change it with the shape, the seed or the tokenizer.
DEMO_VERSION = "demo-v1"
SEED = 20_26
MAX_MODEL_LEN = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
EOS_TOKEN_ID = NUM_BYTES
PAD_TOKEN_ID = NUM_BYTES + 1

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ensure_demo(progress: Callable[[str, float], None], check: Check) -> Path:
    """Return the demo checkpoint's folder; write it first if needed. May raise ConfigError."""
    return cached_folder.ensure(
        DEMO_VERSION, "the demo checkpoint", lambda folder: _write_demo(folder, progress), check
    )


def _write_demo(folder: Path, progress: Callable[[str, float], None]) -> None:
    progress("making the demo checkpoint, once", 0.0)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    # On the meta device the library's own initialisation costs nothing and draws no random numbers.
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    _fill(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _fill(model: Any) -> None:
    """Fill in weights that keep an untrained model from repeating itself.

    With tied embeddings a random model echoes its last token, because the residual stream is mostly
    that token's embedding. So the embeddings are small compared with the layers' outputs, attention
    is sharp, and the last norm spreads the logits.

    Letters get larger embeddings than other bytes, and special tokens tiny ones. So the text is
    mostly letters, and EOS is rarely sampled.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                scale = torch.full((VOCAB_SIZE, 1), 0.25)
                scale[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;'\n")] = 0.7
                scale[list(b"abcdefghijklmnopqrstuvwxyz ")] = 1.0
                scale[NUM_BYTES:] = 0.01
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale * 0.02)
            elif weight.ndim == 2:
                gain = 2.0 if "o_proj" in name or "down_proj" in name else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator))
                weight.mul_(gain * weight.shape[1] ** -0.5)
            elif name == "model.norm.weight":
                weight.fill_(15.0)
            else:
                weight.fill_(4.0 if "q_norm" in name else 1.0)


def byte_tokenizer() -> Any:
    """Make a Hugging Face tokenizer: ids 0 to 255 are the bytes, then come `SPECIAL_TOKENS`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF_SYMBOL, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[1],
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


RANDOM_PREFIX = "random:"
RANDOM = "random_weights.json"
RANDOM_VERSION = "v1"  # part of the folder's name; change it with the settings or the marker

_COMMON = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
_QWEN3: dict[str, Any] = {
    **_COMMON,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    name: {**(_LLAMA if name.startswith("llama") else _QWEN3), **KNOWN_MODELS[name]}
    for name in ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "qwen3-tiny", "llama-tiny")
}


def ensure_random(model: str, check: Check) -> Path:
    """Return the folder of `random:NAME`; write it first if needed. May raise ConfigError."""
    name = model.removeprefix(RANDOM_PREFIX)
    if name not in SHAPES:
        raise ConfigError(
            "no_model", f"no random model is called {name!r}; there are: {', '.join(SHAPES)}"
        )

    def make(folder: Path) -> None:
        folder.mkdir()
        config = {**SHAPES[name], "torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        byte_tokenizer().save_pretrained(folder)
        (folder / RANDOM).write_text(json.dumps({"seed": SEED}), encoding="utf-8")

    return cached_folder.ensure(
        f"random-{name}-{RANDOM_VERSION}", f"the settings of {model}", make, check
    )


def is_random(folder: Path) -> bool:
    return (folder / RANDOM).is_file()
