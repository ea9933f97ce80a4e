"""The device that a model runs on: its choice, precision, memory and timing."""

import contextlib
import gc
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.scheduling.kv_memory import free_host_bytes
from stepscope.engine.scheduling.step import DeviceLostError, DeviceMemoryError


def find_device(setting: str) -> torch.device:
    """Return the device that `setting` names ('auto', 'cpu', 'cuda', 'cuda:N').

    A GPU becomes torch's current device.

    Raises ConfigError: there is no such device.
    """
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(setting)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"device is auto, cpu, cuda or cuda:N, not {setting!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                "device",
                f"device {setting!r} is not there: torch {torch.__version__} sees {count} GPUs; "
                "use --device cpu, or a torch built for your GPU",
            )
        torch.cuda.set_device(device.index or 0)  # Triton launches on the current device
    return device


def find_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `setting` names. 'auto': the fastest one of the device."""
    if setting == "auto":
        # On a CPU with bf16 instructions, the demo model takes 0.65 to 0.85 of the time of fp32 (65
        # ms instead of 95 for a chunk of 256 with 8 decodes). Without them bf16 is emulated: slow.
        has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        return torch.bfloat16 if device.type == "cuda" or has_bf16() else torch.float32
    dtype = getattr(torch, setting)
    assert isinstance(dtype, torch.dtype)
    return dtype


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros for the KV cache.

    Not what the memory held before: `scales_of` measures unused slots, too. On a CPU, calloc
    provides zero pages without writing them. So 1 GiB is ready at once (writing it takes seconds),
    and only the used pages occupy memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def give_back_memory(device: torch.device) -> None:
    """Free the GPU memory that torch holds for reuse, so that it can be allocated as a whole."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def check(device: torch.device) -> None:
    """Raise DeviceLostError if a GPU has failed for good, as after an illegal access."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            message = "the GPU runs no step any more: " + str(error).partition("\n")[0]
            raise DeviceLostError("device_lost", message) from error


@contextlib.contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error in the `with` block into a one-line ConfigError with `remedy`."""
    try:
        yield
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        detail = f" ({asked[1]} more were needed)" if asked else ""
        raise ConfigError(
            "device_memory", f"the GPU has no memory for {what}{detail}: {remedy}"
        ) from None


class HostCopy:
    """An asynchronous copy of tensors to the host. If they are on a CPU, nothing is copied."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class DeviceTimer:
    """Measures the time that a GPU spends on a step. On a CPU it measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )

    def start(self) -> None:
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()

    def elapsed_ns(self) -> int | None:
        """Return the time between `start` and `stop` on the GPU. None on a CPU.

        Waits until the GPU reaches `stop`. If the step samples a token, the caller has waited for
        this already. The time does not include other steps or the gaps between steps.
        """
        if self._events is None:
            return None
        self._events[1].synchronize()
        return round(self._events[0].elapsed_time(self._events[1]) * 1e6)
