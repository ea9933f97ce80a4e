"""The benchmark's random model in transformers: the reference of (j), the other engine of (g)."""

from typing import Any

import torch

from stepscope.engine.models import loader, random_model
from stepscope.engine.models.random_shapes import PREFIX
from stepscope.engine.models.random_weights import RandomWeights


def load(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' model with the same weights as our decoder."""
    from transformers import AutoModelForCausalLM

    folder = random_model.ensure(PREFIX + name)
    config = loader.load_config(folder, name)
    # Build on the device: the library's initial weights are replaced there.
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    # Frequencies from a CPU, like ours and those of a checkpoint: a GPU rounds powers differently.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model = model.to(device).eval().requires_grad_(False)
    weights = RandomWeights(device)
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            parameter.copy_(weights.draw(tensor, tuple(parameter.shape)))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    return model
