"""Models with random weights: `random:NAME`, with a shape from `random_shapes` and no weight file.

A folder with config, tokenizer and the marker file `RANDOM` takes the place of the checkpoint;
`RandomWeights` takes the place of its weights. Such a model is as fast as a real one of its shape.
"""

import json
import shutil
import tempfile
from pathlib import Path

import platformdirs

from stepscope.engine.models import demo
from stepscope.engine.models.random_shapes import PREFIX, SHAPES
from stepscope.engine.protocol.settings.knobs import ConfigError

VERSION = "v1"  # part of the folder's name; change it with the settings or the marker
RANDOM = "random_weights.json"
SEED = 20_26


def ensure(model: str) -> Path:
    """Return the folder of `model` (`random:NAME`); write it to the user's cache if it is missing.

    Raises:
        ConfigError: no shape has this name, or the cache folder cannot be written.
    """
    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        raise ConfigError(
            "no_model", f"no random model is called {name!r}; there are: {', '.join(SHAPES)}"
        )
    folder = Path(platformdirs.user_cache_dir("stepscope")) / f"random-{name}-{VERSION}"
    if (folder / RANDOM).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".random-", dir=folder.parent))
        try:
            write(scratch / name, name)
            if not (folder / RANDOM).is_file():
                shutil.rmtree(folder, ignore_errors=True)
                (scratch / name).rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if (folder / RANDOM).is_file():
            return folder  # another process was there first
        raise ConfigError(
            "random_cache",
            f"the settings of {model} cannot be written to {folder}: {error.strerror or error}; "
            "make room there, or set XDG_CACHE_HOME to another folder",
        ) from None
    return folder


def write(folder: Path, name: str) -> None:
    """Write config, marker file and the demo's byte tokenizer to `folder`.

    The model has more ids than the tokenizer has tokens; the others have no text.
    """
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**SHAPES[name], "torch_dtype": "bfloat16"}, indent=1), encoding="utf-8"
    )
    demo.byte_tokenizer().save_pretrained(folder)
    (folder / RANDOM).write_text(json.dumps({"seed": SEED}), encoding="utf-8")


def is_random(folder: Path) -> bool:
    return (folder / RANDOM).is_file()
