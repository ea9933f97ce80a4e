"""Checks which models can be served, and how long their requests may be.

Refusing a model is better than running it with wrong tokens. So every feature that changes
attention is either handled, checked by the probe in `transformers_model`, or refused here.
"""

from typing import Any

from stepscope.engine.protocol.settings.knobs import ConfigError

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
        _refuse(name, "it is an encoder-decoder; stepscope serves decoder-only models")
    if getattr(text, "kv_lora_rank", None):
        _refuse(name, "it uses multi-head latent attention (MLA), which is not implemented")
    if getattr(text, "attn_temperature_tuning", None):
        _refuse(name, "it scales attention by positions that it counts itself")
    others = sorted(set(own(text, "layer_types") or ()) - set(SERVED_LAYER_TYPES))
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
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            _refuse(name, f"its RoPE is of the type {kind!r}; there are {', '.join(_ROPE_TYPES)}")
        for key in _ROPE_NUMBERS:
            number = rope.get(key)
            if number is not None and not _is_positive(number):
                _refuse(name, f"its config says {key}={number!r} of its RoPE")
    for key in _SIZES:
        size = getattr(text, key, None)
        if size is not None and not (type(size) is int and _is_positive(size)):
            _refuse(name, f"its config says {key}={size!r}")


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


def _refuse(name: str, reason: str) -> None:
    raise ConfigError("unsupported_model", f"{name} cannot be served: {reason}")
