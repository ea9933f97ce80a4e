"""The demo checkpoint: made once on this machine from a fixed seed, then loaded like any other.

Qwen3 architecture, 20 M parameters, one token a byte. It is untrained; with it, scheduling, KV
cache and kernels do real work on a laptop without a download.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.engine.models.cache import cached_folder
from stepscope.engine.models.cache.cached_folder import Check
from stepscope.engine.text.tokenizer import BYTE_OF_SYMBOL

# Part of the folder's name; change it with the shape, the seed or the tokenizer.
VERSION = "demo-v1"
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


def ensure(progress: Callable[[str, float], None], check: Check) -> Path:
    """Return the demo checkpoint's folder; write it first if needed. May raise ConfigError."""

    def make(folder: Path) -> None:
        progress("making the demo checkpoint, once", 0.0)
        write(folder)

    return cached_folder.ensure(VERSION, "the demo checkpoint", make, check)


def write(folder: Path) -> None:
    """Write the demo checkpoint to `folder`: the same weights every time."""
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
