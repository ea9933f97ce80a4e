"""Finds a checkpoint on this machine and checks its files; each fault has its own error message.

Uses the network only for `--model smollm2`, the first time.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from stepscope.engine.models import gguf_checkpoint, smollm2
from stepscope.engine.models.made_checkpoints import (
    RANDOM_PREFIX,
    ensure_demo,
    ensure_random,
    is_random,
)
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def locate(model: str, progress: Progress) -> Path:
    """Find the folder of the checkpoint that `model` names, and check its files.

    `model`: 'demo', 'smollm2', 'random:NAME' with random weights, a folder, a GGUF file, or the
    name of a model in the local Hugging Face cache.

    Raises ConfigError: there is no such checkpoint here, or it is incomplete.
    """
    if model == "demo":
        folder = ensure_demo(progress, check)
    elif model == smollm2.NAME:
        folder = smollm2.checkpoint_of(progress, check)
    elif model.startswith(RANDOM_PREFIX):
        folder = ensure_random(model, check)
    elif Path(model).expanduser().is_dir():
        folder = Path(model).expanduser()
    elif model.endswith(gguf_checkpoint.SUFFIX):
        folder = gguf_checkpoint.checkpoint_of(Path(model).expanduser(), progress, check)
    else:
        folder = _cached(model)
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Raise ConfigError if config, weights or tokenizer are missing, or a weight file is cut."""
    read_json(folder / "config.json", "a checkpoint has one; is this the right folder?")
    if not is_random(folder):
        _check_safetensors(weight_files(folder))
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            "no_tokenizer",
            f"{folder} has no tokenizer (tokenizer.json): copy it from where the weights came from",
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, in order. Raises ConfigError if one lacks."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "it names the weight files")
        names = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                "no_weights",
                f"{folder} lacks {len(missing)} of {len(names)} weight files (first: "
                f"{missing[0]}): copy the checkpoint again",
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for file in (*folder.glob("*.bin"), *folder.glob("*.gguf")))
        seen = f"; {others[0]} is of another format: convert it" if others else ""
        if others and others[0].endswith(gguf_checkpoint.SUFFIX):
            seen = f"; give the file: --model {folder / others[0]}"
        raise ConfigError("no_weights", f"{folder} has no weights (*.safetensors){seen}")
    return files


def read_json(file: Path, purpose: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no_config", f"{file} is missing: {purpose}") from None
    except OSError as error:
        raise ConfigError("no_config", f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError("bad_config", f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("bad_config", f"{file} holds a {type(value).__name__}, not an object")
    return value


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint. Raises ConfigError if its files cannot be used."""
    from transformers import AutoTokenizer

    try:
        return Tokenizer(
            AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
    except Exception as error:  # noqa: BLE001 - the Rust tokenizer raises plain Exception
        refuse_file("bad_tokenizer", f"the tokenizer in {folder} cannot be read", error)


def refuse_file(code: str, what: str, error: BaseException) -> NoReturn:
    """Raise a ConfigError with the first line of an `error` that a library raised for a file."""
    lines = str(error).strip().splitlines()
    detail = lines[0].strip() if lines else type(error).__name__
    raise ConfigError(code, f"{what}: {detail}") from error


def _cached(model: str) -> Path:
    """Return the folder of `model` in the local Hugging Face cache (a snapshot)."""
    if model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model:
        raise ConfigError("no_model", f"there is no folder {model!r}: give one with a checkpoint")
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ConfigError(
            "no_model",
            f"{model!r} is neither a folder here nor in the Hugging Face cache ({HF_HUB_CACHE}): "
            f"fetch it with `hf download {model}`, or use --model demo",
        ) from None


def _check_safetensors(files: Sequence[Path]) -> None:
    """Check that each file is as long as its header says, and that no tensor is in two of them."""
    from safetensors import SafetensorError, safe_open

    file_of: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as found:
                tensors = list(found.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                "bad_weights", f"{file} is damaged, or cut short: copy it again ({error})"
            ) from None
        for tensor in tensors:
            if tensor in file_of:
                raise ConfigError(
                    "bad_weights",
                    f"{file_of[tensor]} and {file.name} both hold {tensor}: remove the file that "
                    "does not belong to the model",
                )
            file_of[tensor] = file
