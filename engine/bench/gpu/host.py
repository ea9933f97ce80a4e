"""Facts about the machine for a report: driver, clocks, processor, and stepscope's commit."""

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
    """Return what nvidia-smi reports about 'cuda:N'. Empty if there is no nvidia-smi.

    Only queries: it changes no setting.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = (tool, "--format=csv,noheader", "-i", device.partition(":")[2] or "0")
    values = _output(*query, f"--query-gpu={','.join(_FIELDS)}").split(", ")
    if len(values) != len(_FIELDS):
        # One field that the driver does not support fails the whole query.
        values = [_output(*query, f"--query-gpu={field}") for field in _FIELDS]
    return {name: value for name, value in zip(_FIELDS.values(), values, strict=True) if value}


def gpu_name(device: str) -> str | None:
    """Return torch's name for `device` ('cuda', 'cuda:N'). None if torch sees no such device.

    Asks in a child process, so that this process takes none of the device's memory.
    """
    code = "import sys, torch; print(torch.cuda.get_device_name(torch.device(sys.argv[1])))"
    return _output(sys.executable, "-c", code, device, timeout_s=120.0) or None


def describe() -> Facts:
    """Return the processor, the system and the Python version."""
    machine = describe_machine()
    return {
        "python": machine.python,
        "system": machine.system,
        "cpu": machine.cpu,
        "num_cores": machine.num_cores,
    }


def commit() -> str | None:
    """Return the git commit of stepscope's working tree.

    None if this code is not in a working tree.
    """
    root = Path(__file__).parents[3]
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
