"""What a report says of the machine: packages, driver, clocks, and the commit it was run from."""

import shutil
import subprocess
import sys
from pathlib import Path

from stepscope.engine.bench.gpu.results import Facts
from stepscope.engine.bench.machine import describe_machine

_FIELDS = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory",
    "power.limit": "power_limit",
    "power.draw": "power_draw",
    "clocks.max.sm": "max_sm_clock",
    "clocks.sm": "sm_clock",
    "clocks.max.mem": "max_memory_clock",
    "clocks.mem": "memory_clock",
    "temperature.gpu": "temperature",
    "clocks_event_reasons.active": "throttled_by",
}


def nvidia_smi(device: str) -> Facts:
    """What the tool says of 'cuda:N'; empty where there is none. Changes nothing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = (tool, "--format=csv,noheader", "-i", device.partition(":")[2] or "0")
    values = _output(*query, f"--query-gpu={','.join(_FIELDS)}").split(", ")
    if len(values) != len(_FIELDS):
        # A field that a driver does not know takes the others with it.
        values = [_output(*query, f"--query-gpu={field}") for field in _FIELDS]
    return {name: value for name, value in zip(_FIELDS.values(), values, strict=True) if value}


def gpu_name(device: str) -> str | None:
    """What torch calls `device` ('cuda', 'cuda:N'); None: it sees none.

    Another process asks it: this one is to take nothing of the device's memory.
    """
    code = "import sys, torch; print(torch.cuda.get_device_name(torch.device(sys.argv[1])))"
    return _output(sys.executable, "-c", code, device, timeout_s=120.0) or None


def describe() -> Facts:
    """Processor, system, Python."""
    machine = describe_machine()
    return {
        "python": machine.python,
        "system": machine.system,
        "cpu": machine.cpu,
        "num_cores": machine.num_cores,
    }


def commit() -> str | None:
    """Of the working tree that this file is in; None: it is not in one of stepscope's."""
    root = Path(__file__).parents[2]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    found = _output(git, "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not found:
        return None
    changed = _output(git, "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{found}, and changes" if changed else found


def _output(*command: str, timeout_s: float = 10.0) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
