"""The machine and software of a measurement. Reads versions without importing the packages."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import msgspec

_PACKAGES = ("stepscope", "torch", "transformers", "safetensors", "numpy", "pyzmq", "msgspec")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The software versions and the processor of a measurement."""

    python: str
    system: str
    cpu: str
    num_cores: int  # that this process may use
    packages: dict[str, str]  # the installed ones


def describe_machine() -> Machine:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    has_affinity = hasattr(os, "sched_getaffinity")
    return Machine(
        python=platform.python_version(),
        system=platform.platform(),
        cpu=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        packages=packages,
    )


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
