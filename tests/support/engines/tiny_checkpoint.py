"""`write_checkpoint`: writes a small random checkpoint of a model family."""

from pathlib import Path

_WINDOWS: dict[str, object] = {
    "head_dim": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Two layers of width 64 with 4 query and 2 KV heads, and what distinguishes each family.
TINY_MODELS: dict[str, dict[str, object]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 20, "head_dim": 16},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 24},
    "gemma2": {**_WINDOWS, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "phi3": {},
    "phimoe": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "gpt_oss": {
        **_WINDOWS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


def write_checkpoint(folder: Path, family: str, changes: dict[str, object]) -> None:
    """Write its weights, its config and a byte tokenizer; `changes` are to the config."""
    # Here, not above: most tests need no torch, and importing it takes seconds.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stepscope.engine.models.made_checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": EOS_TOKEN_ID,
        **TINY_MODELS[family],
        **changes,
    }
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for weight in model.parameters():
            # Larger than usual, so that attention is sharp and no two logits are nearly equal.
            weight.add_(torch.randn_like(weight) * 0.15)
            weight.copy_(weight.bfloat16())  # as most checkpoints are
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
