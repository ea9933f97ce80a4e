"""Loads a checkpoint: into our own decoder if it can run the model, else into transformers."""

from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from stepscope.engine.models.checkpoint import Progress, read_json, refuse_file
from stepscope.engine.models.decoder import Decoder
from stepscope.engine.models.made_checkpoints import is_random
from stepscope.engine.models.model_config import check_config, misfit, refuse
from stepscope.engine.models.transformers_model import ATTENTION, TransformersModel, attention
from stepscope.engine.models.weights import RandomWeights, Weights, check_tensors, refuse_unused
from stepscope.engine.protocol.engine_config import ModelImpl
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.text.tokenizer import Tokenizer

Model: TypeAlias = Decoder | TransformersModel


def load_config(folder: Path, name: str) -> Any:
    """Load the configuration of a model and check that it can be served.

    Raises ConfigError: transformers does not know the model, or it needs something that is not
    implemented.
    """
    raw = read_json(folder / "config.json", "a checkpoint has one; is this the right folder?")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        reason = f"transformers {transformers.__version__} knows no model_type {kind!r}"
        if "auto_map" in raw:
            reason = "it needs Python code that came with it, which stepscope does not run"
        refuse(name, reason)
    try:
        # Without trust_remote_code=False, the library might ask on the terminal whether to run it.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - validators raise types of their own
        refuse_file("bad_config", f"{name} has a config that transformers cannot use", error)
    check_config(config, name)
    if misfit(config) is not None and _model_class(config) is None:
        architectures = ", ".join(config.architectures or ()) or "not given"
        what = f"{config.model_type!r} is no causal language model"
        refuse(name, f"{what} (architectures: {architectures})")
    return config


def load_model(
    folder: Path,
    name: str,
    config: Any,
    implementation: ModelImpl,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Model:
    """Read the weights of `folder` and put them on `device`.

    Raises ConfigError: weights are missing or have another shape; they do not fit on the device;
    the model cannot be served exactly, or the chosen implementation cannot run it.
    """
    if implementation != "transformers":
        reason = misfit(config)
        if reason is not None and implementation == "lean":
            raise ConfigError(
                "model_impl", f"the lean decoder cannot run {name}: {reason}; use --model-impl auto"
            )
        if reason is None:
            try:
                source = RandomWeights(device) if is_random(folder) else Weights(folder, name)
                return Decoder(source, name, config, max_model_len, dtype, device, progress)
            except ConfigError:
                # The library knows more names for the tensors of a checkpoint, so try it, too. If
                # it fails as well, its error is the one to report.
                if implementation == "lean" or is_random(folder):
                    raise
    if is_random(folder):
        raise ConfigError(
            "model_impl", f"{name} has no weights for transformers to read: use --model-impl auto"
        )
    return _load_transformers(folder, name, config, dtype, device, progress)


def _load_transformers(
    folder: Path,
    name: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> TransformersModel:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attention)
    model_class = _model_class(config)
    assert model_class is not None
    if not getattr(model_class, "_supports_attention_backend", False):
        why = "does not attend through the library's attention interface"
        refuse(name, f"{model_class.__name__} {why}")
    progress("loading weights", 0.0)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
        model = model.to(device)
    except Exception as error:  # noqa: BLE001 - the library's code may raise anything
        refuse_file("bad_weights", f"the weights of {name} cannot be loaded", error)
    check_tensors(list(info["missing_keys"]), list(info["mismatched_keys"]), name)
    refuse_unused(info["unexpected_keys"], name)
    model.eval()
    model.requires_grad_(False)
    return TransformersModel(model, name, device)


def _model_class(config: Any) -> Any:
    # Imported here, because it imports half of torch's compiler, which takes seconds.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple | list) else found


def eos_token_ids(config: Any, folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return every token that ends a text. Raises ConfigError if one is no token."""
    told = [getattr(config.get_text_config(), "eos_token_id", None), tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        settings = read_json(folder / "generation_config.json", "it holds generation settings")
        told.append(settings.get("eos_token_id"))
    found: set[int] = set()
    for each in told:
        ids = each if isinstance(each, list | tuple) else [each]
        for token_id in ids:
            if token_id is not None and type(token_id) is not int:
                raise ConfigError("bad_config", f"{folder} names {token_id!r} as an end token")
        found.update(token_id for token_id in ids if token_id is not None and token_id >= 0)
    return frozenset(found)
