"""Shapes of well-known models that can run with random weights, as in their `config.json`.

`--model random:NAME` makes such a model from a seed: as fast as the real one, but its output is
noise. The sizes are those that the models' makers publish with the weights. Imports nothing.
"""

from typing import Any

PREFIX = "random:"

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "vocab_size": 151936,
}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "vocab_size": 128256,
}
# Small models of the same two families, for CPUs and tests: a step takes a millisecond or two.
_TINY: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-tiny": {**_QWEN3, **_TINY, "tie_word_embeddings": True},
    "llama-tiny": {**_LLAMA, **_TINY, "tie_word_embeddings": False},
}
