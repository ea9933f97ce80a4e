"""Models with random weights: `random:NAME`, with a well-known shape and no weight file.

A folder with config, tokenizer and the marker file `RANDOM` takes the place of the checkpoint;
`RandomWeights` takes the place of its weights. Such a model is as fast as a real one of its shape,
but its output is noise.
"""

import json
from pathlib import Path
from typing import Any

from stepscope.engine.models import demo
from stepscope.engine.models.cache import cached_folder
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.simulation.model_shape import KNOWN_MODELS

PREFIX = "random:"
RANDOM = "random_weights.json"
VERSION = "v1"  # part of the folder's name; change it with the settings or the marker
SEED = 20_26

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    name: {**(_LLAMA if name.startswith("llama") else _QWEN3), **KNOWN_MODELS[name]}
    for name in ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "qwen3-tiny", "llama-tiny")
}


def ensure(model: str) -> Path:
    """Return the folder of `random:NAME`; write it first if needed. May raise ConfigError."""
    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        raise ConfigError(
            "no_model", f"no random model is called {name!r}; there are: {', '.join(SHAPES)}"
        )

    def check(folder: Path) -> None:
        if not is_random(folder):
            raise ConfigError("no_model", f"{folder} has no {RANDOM}")

    return cached_folder.ensure(
        f"random-{name}-{VERSION}",
        f"the settings of {model}",
        lambda folder: write(folder, name),
        check,
    )


def write(folder: Path, name: str) -> None:
    """Write config, marker file and the demo's byte tokenizer to `folder`."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**SHAPES[name], "torch_dtype": "bfloat16"}, indent=1), encoding="utf-8"
    )
    demo.byte_tokenizer().save_pretrained(folder)
    (folder / RANDOM).write_text(json.dumps({"seed": SEED}), encoding="utf-8")


def is_random(folder: Path) -> bool:
    return (folder / RANDOM).is_file()
