"""Random checkpoints of three sizes, written once to the user's cache folder.

Qwen3 shapes with untied embeddings, heads of 64 and twice (or three times) as many query heads as
key heads. The tokenizer is the demo model's; every contender is given token ids.
"""

from pathlib import Path
from typing import NamedTuple

from stepscope.engine.models import cached_folder

SEED, HEAD_DIM, ROPE_THETA = 20_26, 64, 10_000.0


class Shape(NamedTuple):
    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def num_layer_parameters(self) -> int:
        attention = 2 * self.hidden_size * HEAD_DIM * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_matmul_parameters(self) -> int:
        """Weights a decode step multiplies with: everything but the input embedding (and norms)."""
        return self.num_layers * self.num_layer_parameters + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_matmul_parameters + self.vocab_size * self.hidden_size

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * HEAD_DIM


# The middle and the large one have 25 M and 135 M parameters without their input embedding.
SHAPES = {
    "5M": Shape("5M", 256, 4, 4, 2, 512, 4_096),
    "25M": Shape("25M", 384, 12, 6, 2, 1_024, 16_384),
    "135M": Shape("135M", 576, 30, 9, 3, 1_536, 49_152),
}


def ensure(shape: Shape) -> Path:
    """The folder of the checkpoint, which is written unless it exists."""
    return cached_folder.ensure(
        f"bench-{shape.name}-v1",
        f"the checkpoint of {shape.name}",
        lambda folder: _write(shape, folder),
        lambda folder: None,
    )


def _write(shape: Shape, folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from stepscope.engine.models.made_checkpoints import byte_tokenizer

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Sharp attention: with the norms at 1 every prompt would end in the same text.
                parameter.fill_(3.0 if "q_norm" in name else 1.0)
            else:
                std = 0.3 if "embed_tokens" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0.0, std, generator=generator)
        for name, buffer in model.named_buffers():
            if "inv_freq" in name:
                steps = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM
                buffer.copy_(1.0 / ROPE_THETA**steps)
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
