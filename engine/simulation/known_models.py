"""Sizes of well-known models, in the fields of the `config.json` that their makers publish."""

from typing import Any


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
        2048,
        48,
        32,
        4,
        6144,
        151936,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "llama-4-scout": _shape(
        5120,
        48,
        40,
        8,
        8192,
        202048,
        model_type="llama4",
        num_local_experts=16,
        num_experts_per_tok=1,
    ),
    # For CPUs and tests.
    "qwen3-tiny": _shape(64, 2, 4, 2, 160, 512, head_dim=32, tie_word_embeddings=True),
    "llama-tiny": _shape(64, 2, 4, 2, 160, 512, head_dim=32),
}
# Experts in fp8, attention in bf16: the usual way to serve this model.
KNOWN_MODELS["llama-4-scout-fp8"] = {
    **KNOWN_MODELS["llama-4-scout"],
    "quantization_config": {"quant_method": "fp8", "ignore": ["re:.*self_attn"]},
}
