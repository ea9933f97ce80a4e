"""`ModelShape`: the sizes in a model's config.json that determine the time of its steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.engine.protocol.knobs import ConfigError


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": inner,
        "vocab_size": vocab,
        **more,
    }


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 28, 16, 8, 3072, 151936, tie_word_embeddings=True),
    "qwen3-8b": _shape(4096, 36, 32, 8, 12288, 151936),
    "qwen3-14b": _shape(5120, 40, 40, 8, 17408, 151936),
    "qwen3-32b": _shape(5120, 64, 64, 8, 25600, 151936),
    "qwen2.5-7b": _shape(3584, 28, 28, 4, 18944, 152064),
    "llama-2-7b": _shape(4096, 32, 32, 32, 11008, 32000),
    "llama-2-70b": _shape(8192, 80, 64, 8, 28672, 32000),
    "llama-3.1-8b": _shape(4096, 32, 32, 8, 14336, 128256),
    "llama-3.1-70b": _shape(8192, 80, 64, 8, 28672, 128256),
    "codellama-34b": _shape(8192, 48, 64, 8, 22016, 32000),
    "mistral-7b": _shape(4096, 32, 32, 8, 14336, 32768),
    "mistral-nemo": _shape(5120, 40, 32, 8, 14336, 131072),
    "yi-34b": _shape(7168, 60, 56, 8, 20480, 64000),
    "mixtral-8x7b": _shape(
        4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _shape(
        6144, 56, 48, 8, 16384, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3-30b-a3b": _shape(
        2048, 48, 32, 4, 6144, 151936,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "llama-4-scout": _shape(
        5120, 48, 40, 8, 8192, 202048,
        model_type="llama4", num_local_experts=16, num_experts_per_tok=1,
    ),
    # For CPUs and tests.
    "qwen3-tiny": _shape(64, 2, 4, 2, 160, 512, head_dim=32, tie_word_embeddings=True),
    "llama-tiny": _shape(64, 2, 4, 2, 160, 512, head_dim=32),
}  # fmt: skip
# Experts in fp8, attention in bf16: the usual way to serve this model.
KNOWN_MODELS["llama-4-scout-fp8"] = {
    **KNOWN_MODELS["llama-4-scout"],
    "quantization_config": {"quant_method": "fp8", "ignore": ["re:.*self_attn"]},
}


_RANDOM = "random:"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_FP8 = 1.0
_BF16 = 2.0


class ModelShape(Struct, frozen=True, kw_only=True):
    """Sizes of a model. Weights are counted in elements, for the whole model."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_weights: int
    mlp_weights: int  # those that every token uses: dense layers, shared experts, routers
    expert_weights: int  # of one expert, in all layers with experts; 0 without experts
    num_experts: int
    num_experts_per_token: int
    head_weights: int
    embedding_weights: int  # 0 if tied: the head is also the embedding
    attention_bytes: float  # bytes of one weight
    mlp_bytes: float
    kv_bytes: float = _BF16  # bytes of one element of the KV cache

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that a step of many tokens reads, so without the embedding."""
        return (
            self.attention_weights * self.attention_bytes
            + (self.mlp_weights + self.expert_weights * self.num_experts) * self.mlp_bytes
            + self.head_weights * _BF16
        )

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.embedding_weights * _BF16

    def num_experts_used(self, num_tokens: int) -> float:
        """Expected number of experts that a layer uses, each token choosing evenly by itself."""
        share = self.num_experts_per_token / self.num_experts
        return self.num_experts * (1 - (1 - share) ** num_tokens)


def model_shape(model: str) -> ModelShape:
    """Return the shape of a model.

    Takes a name of `KNOWN_MODELS`, `random:NAME`, or a config.json (or its folder). A name as on
    Hugging Face, such as `meta-llama/Llama-3.1-8B-Instruct`, counts as the longest known name that
    it begins with. A name with `fp8` in it has weights of one byte.

    Raises ConfigError: there is no such model, or its config lacks a field that is needed.
    """
    known = _known(model)
    if known is not None:
        config = KNOWN_MODELS[known]
        if "fp8" in model.lower() and "quantization_config" not in config:
            config = {**config, "quantization_config": {"quant_method": "fp8"}}
        return shape_of_config(model.removeprefix(_RANDOM).rpartition("/")[2].lower(), config)
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            "unknown_model",
            f"no model {model!r} is known; there are: {', '.join(KNOWN_MODELS)}; or give the path "
            "of a config.json",
        )
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError("bad_model", f"{path} is no config.json of a model: {error}") from error
    return shape_of_config(path.parent.name, config)


def _known(model: str) -> str | None:
    """Return the longest known name that the model's name begins with; None if there is none."""
    name = model.removeprefix(_RANDOM).lower()
    if name.removesuffix("-fp8") in KNOWN_MODELS:
        return name if name in KNOWN_MODELS else name.removesuffix("-fp8")
    if name.count("/") != 1:
        return None
    name = name.partition("/")[2].removeprefix("meta-")
    begins = [known for known in KNOWN_MODELS if f"{name}-".startswith(f"{known}-")]
    found = max(begins, key=len, default=None)
    return f"{found}-fp8" if "fp8" in name and f"{found}-fp8" in KNOWN_MODELS else found


def shape_of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model from its Hugging Face config.

    Raises:
        ConfigError: the config lacks a field that is needed, or describes an attention that we do
            not model.
    """
    text = config.get("text_config") or config
    if "kv_lora_rank" in text:
        raise ConfigError("unknown_model", f"{name}: latent attention (MLA) is not modelled")
    hidden = _count(name, text, "hidden_size")
    layers = _count(name, text, "num_hidden_layers")
    heads = _count(name, text, "num_attention_heads")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    dim = int(text.get("head_dim") or hidden // heads)
    inner = _count(name, text, "intermediate_size")
    vocab = _count(name, text, "vocab_size")
    num_experts = int(next((text[key] for key in _EXPERTS if text.get(key)), 0))
    expert_layers = 0
    expert_inner = int(text.get("moe_intermediate_size") or inner)
    mlp = 3 * hidden * inner * layers
    if num_experts:
        expert_layers = layers // int(text.get("interleave_moe_layer_step") or 1)
        dense_inner = int(text.get("intermediate_size_mlp") or inner)
        mlp = 3 * hidden * dense_inner * (layers - expert_layers)
        mlp += expert_layers * hidden * (num_experts + 3 * _shared_inner(text, expert_inner))
    is_fp8 = _is_fp8(config)
    whole = (config.get("quantization_config") or {}).get("ignore") or ()
    has_whole_attention = any("self_attn" in str(each) for each in whole)
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        attention_weights=hidden * dim * (2 * heads + 2 * kv_heads) * layers,
        mlp_weights=mlp,
        expert_weights=3 * hidden * expert_inner * expert_layers,
        num_experts=num_experts,
        num_experts_per_token=int(text.get("num_experts_per_tok") or 0),
        head_weights=vocab * hidden,
        embedding_weights=0 if config.get("tie_word_embeddings") else vocab * hidden,
        attention_bytes=_FP8 if is_fp8 and not has_whole_attention else _BF16,
        mlp_bytes=_FP8 if is_fp8 else _BF16,
    )


def _count(name: str, config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise ConfigError("bad_model", f"the config of {name} has no {field}")
    return value


def _shared_inner(text: Mapping[str, Any], expert_inner: int) -> int:
    if text.get("shared_expert_intermediate_size"):
        return int(text["shared_expert_intermediate_size"])
    default = 1 if str(text.get("model_type", "")).startswith("llama4") else 0
    return expert_inner * int(text.get("n_shared_experts") or default)


def _is_fp8(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "fp8":
        return True
    groups = quantization.get("config_groups") or {}
    return any(
        (group.get("weights") or {}).get("num_bits") == 8
        and (group.get("weights") or {}).get("type") == "float"
        for group in groups.values()
    )
