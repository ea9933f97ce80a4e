"""What a model's config says: whether it can be served, and its shape for our own decoder.

Refusing a model is better than running it with wrong tokens. So every feature that changes
attention is either handled, checked by the probe in `transformers_model`, or refused here.
`misfit`: why our decoder cannot run a model; transformers' modules can.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from stepscope.engine.models.weights import Shape
from stepscope.engine.protocol.knobs import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # of our own decoder
_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_ROPE_NUMBERS = ("factor", "rope_theta", "original_max_position_embeddings")
_MAX_SIZE = 1 << 40
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
# The `layer_types` that we serve: softmax attention over all keys, or over a window of them.
SERVED_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_config(config: Any, name: str) -> None:
    """Refuse a model that cannot be served exactly over a paged KV cache."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        refuse(name, "it is an encoder-decoder; stepscope serves decoder-only models")
    if getattr(text, "kv_lora_rank", None):
        refuse(name, "it uses multi-head latent attention (MLA), which is not implemented")
    if getattr(text, "attn_temperature_tuning", None):
        refuse(name, "it scales attention by positions that it counts itself")
    others = sorted(set(own(text, "layer_types") or ()) - set(SERVED_LAYER_TYPES))
    if others:
        refuse(name, f"it has layers of another kind than softmax attention ({', '.join(others)})")
    if getattr(text, "num_kv_shared_layers", 0):
        refuse(name, "its layers share keys and values, which is not implemented")
    bidirectional = getattr(text, "use_bidirectional_attention", None)
    if bidirectional not in (None, False) or getattr(text, "is_causal", True) is False:
        refuse(name, "it attends in both directions; stepscope serves causal models")
    for rope in _rope_parameters(text):
        if rope.get("mrope_section"):
            refuse(name, "its positions have several dimensions (M-RoPE), not implemented")
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            refuse(name, f"its RoPE is of the type {kind!r}; there are {', '.join(_ROPE_TYPES)}")
        for key in _ROPE_NUMBERS:
            number = rope.get(key)
            if number is not None and not _is_positive(number):
                refuse(name, f"its config says {key}={number!r} of its RoPE")
    for key in _SIZES:
        size = getattr(text, key, None)
        if size is not None and not (type(size) is int and _is_positive(size)):
            refuse(name, f"its config says {key}={size!r}")


def longest_request(config: Any, name: str, asked: int) -> int:
    """Return how many tokens a request may have: `asked`, or the model's own limit if `asked` is 0.

    YaRN and linear scaling stretch positions beyond `max_position_embeddings`; the limit is the one
    that vLLM derives (`_get_and_verify_max_len`). With RoPE whose frequencies depend on the longest
    sequence in the batch ('dynamic', 'longrope'), the keys of a token depend on the other requests.
    So the limit of such models is the length from which on the frequencies change.

    Raises ConfigError: `asked` is above the limit, or 0 and the model has no limit.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    why = "the model's own limit (max_position_embeddings)"
    ropes = _rope_parameters(text)
    if limit and len(ropes) == 1 and ropes[0].get("rope_type") in ("linear", "yarn"):
        before = ropes[0].get("original_max_position_embeddings") or limit
        limit = round((before if ropes[0]["rope_type"] == "yarn" else limit) * ropes[0]["factor"])
        why = "the model's own limit (max_position_embeddings, and the factor of its RoPE)"
    for rope in ropes:
        if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            name_of_it = "original_max_position_embeddings"
            original = rope.get(name_of_it) or getattr(text, name_of_it, None) or limit
            if original and (limit is None or original <= limit):
                limit = original
                why = f"where the frequencies of its {kind!r} RoPE change with the batch"
    if asked and limit and asked > limit:
        raise ConfigError(
            "max_model_len",
            f"max_model_len={asked} is above {limit}, {why}: ask for at most {limit}",
        )
    longest = asked or limit
    if not longest:
        why = f"{name} does not say how long its requests may be: set --max-model-len"
        raise ConfigError("max_model_len", why)
    return int(longest)


def sliding_layers(config: Any) -> set[int]:
    """Return the indices of the layers with sliding-window attention, according to the config."""
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    if not own(text, "sliding_window"):
        return set()
    kinds = own(text, "layer_types")
    if kinds:
        return {i for i, kind in enumerate(kinds[:num_layers]) if kind == "sliding_attention"}
    uses = own(text, "use_sliding_window")
    return set(range(num_layers)) if uses is None or uses else set()


def own(config: Any, key: str) -> Any:
    """Return a setting if the family of a config declares it: files may hold those of others."""
    declares = any(key in getattr(each, "__annotations__", {}) for each in type(config).__mro__)
    return getattr(config, key, None) if declares else None


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _is_positive(number: object) -> bool:
    return type(number) in (int, float) and 0 < number < _MAX_SIZE  # type: ignore[operator]


def refuse(name: str, reason: str) -> NoReturn:
    raise ConfigError("unsupported_model", f"{name} cannot be served: {reason}")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
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
        """`config`: a `PreTrainedConfig` for which `misfit` returns None."""
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
