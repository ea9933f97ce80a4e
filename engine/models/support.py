"""Checks which models can be served, and how long their requests may be.

Refusing a model is better than running it with wrong tokens. So every feature that changes
attention is either handled, checked by the probe in `transformers_model`, or refused here.
"""

from typing import Any

from stepscope.engine.protocol.settings.config_error import ConfigError

# The `layer_types` that we serve: softmax attention over all keys, or over a window of them.
SERVED_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_config(config: Any, name: str) -> None:
    """Refuse a model that cannot be served exactly over a paged KV cache.

    Args:
        config: a `PreTrainedConfig` of the transformers library.
        name: the model's name, for the message.

    Raises:
        ConfigError: says why, in one line.
    """
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        _refuse(name, "it is an encoder-decoder; stepscope serves decoder-only models")
    if getattr(text, "kv_lora_rank", None):
        _refuse(name, "it uses multi-head latent attention (MLA), which is not implemented")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(SERVED_LAYER_TYPES))
    if others:
        _refuse(name, f"it has layers of another kind than softmax attention ({', '.join(others)})")
    if getattr(text, "num_kv_shared_layers", 0):
        _refuse(name, "its layers share keys and values, which is not implemented")
    bidirectional = getattr(text, "use_bidirectional_attention", None)
    if bidirectional not in (None, False) or getattr(text, "is_causal", True) is False:
        _refuse(name, "it attends in both directions; stepscope serves causal models")
    for rope in _rope_parameters(text):
        if rope.get("mrope_section"):
            _refuse(name, "its positions have several dimensions (M-RoPE), not implemented")


def longest_request(config: Any, name: str, asked: int) -> int:
    """Return how many tokens a request may have: `asked`, or the model's own limit if `asked` is 0.

    With RoPE whose frequencies depend on the longest sequence in the batch ('dynamic', 'longrope'),
    the keys of a token depend on the other requests. So the limit of such models is the length from
    which on the frequencies change.

    Raises:
        ConfigError: `asked` is above the limit, or 0 and the model has no limit.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    why = "the model's own limit (max_position_embeddings)"
    for rope in _rope_parameters(text):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = (
                rope.get("original_max_position_embeddings")
                or getattr(text, "original_max_position_embeddings", None)
                or limit
            )
            if original and (limit is None or original <= limit):
                limit = original
                why = (
                    f"where the frequencies of its {rope['rope_type']!r} RoPE change with the batch"
                )
    if asked and limit and asked > limit:
        raise ConfigError(
            "max_model_len",
            f"max_model_len={asked} is above {limit}, {why}: ask for at most {limit}",
        )
    longest = asked or limit
    if not longest:
        raise ConfigError(
            "max_model_len",
            f"{name} does not say how long its requests may be: set --max-model-len",
        )
    return int(longest)


def sliding_layers(config: Any) -> set[int]:
    """Return the indices of the layers with sliding-window attention, according to the config."""
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return {i for i, kind in enumerate(kinds[:num_layers]) if kind == "sliding_attention"}
    if getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None):
        return set(range(num_layers))
    return set()


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    """Return the RoPE settings of a model: one set, or one for each type of layer."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def _refuse(name: str, reason: str) -> None:
    raise ConfigError("unsupported_model", f"{name} cannot be served: {reason}")
