"""`DecoderConfig`: the shape of a model for our own decoder; `misfit`: why that cannot run it."""

from dataclasses import dataclass
from typing import Any

from stepscope.engine.models.support import own, sliding_layers
from stepscope.engine.models.weights import Shape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and options of a model that `decoder.py` runs."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool  # the embeddings are also the weights of the output head
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # one a layer

    @classmethod
    def of(cls, config: Any) -> "DecoderConfig":
        """Make a `DecoderConfig` from a `PreTrainedConfig` for which `misfit` returns None."""
        kind = config.model_type
        attention_bias = bool(own(config, "attention_bias"))
        sliding = sliding_layers(config)
        return cls(
            architecture=_first(config.architectures) or f"{kind} decoder",
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=kind == "qwen2" or attention_bias,
            out_bias=kind != "qwen2" and attention_bias,
            mlp_bias=bool(own(config, "mlp_bias")),
            qk_norm=kind == "qwen3",
            windows=tuple(
                config.sliding_window if i in sliding else None
                for i in range(config.num_hidden_layers)
            ),
        )

    def weight_shapes(self) -> dict[str, Shape]:
        """Shape of every tensor to read from the checkpoint, by name."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_heads * dim, self.num_kv_heads * dim
        linears = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.out_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
        shapes: dict[str, Shape] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for i in range(self.num_layers):
            for name, (rows, columns, has_bias) in linears.items():
                shapes[f"model.layers.{i}.{name}.weight"] = (rows, columns)
                if has_bias:
                    shapes[f"model.layers.{i}.{name}.bias"] = (rows,)
            for name, size in norms.items():
                shapes[f"model.layers.{i}.{name}.weight"] = (size,)
        return shapes


def misfit(config: Any) -> str | None:
    """Return why our decoder cannot run the model of a `PreTrainedConfig`; None if it can."""
    kind = config.model_type
    if kind not in FAMILIES:
        return f"{kind!r} is none of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}, not 'silu'"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated"
    if _head_dim(config) % 2:
        return f"its heads have an odd number of dimensions ({_head_dim(config)})"
    return None


def _first(names: Any) -> str | None:
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
