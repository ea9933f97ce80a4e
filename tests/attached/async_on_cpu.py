"""A vLLM plugin that schedules asynchronously on a CPU, where vLLM itself turns that off.

Two batches are in flight then, as on a GPU: a worker runs one while the scheduler makes the next.
What the worker asks of CUDA's streams and events does nothing, since a CPU runs in order.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Nothing:
    """An event or a stream that is always done."""

    device = torch.device("cpu")

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *args: object) -> None: ...


@contextlib.contextmanager
def _stream(_: object) -> Iterator[None]:
    yield


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "is_made_asynchronous"):
        return
    CpuPlatform.is_made_asynchronous = True
    CpuPlatform.check_and_update_config = classmethod(
        _asynchronous(CpuPlatform.check_and_update_config.__func__)
    )
    torch.Event = torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = _Nothing
    torch.cuda.stream = _stream
    if multiprocessing.parent_process() is not None:  # else it is the front end
        from vllm.v1.worker import cpu_model_runner

        # It installs streams, and those of older releases cannot be waited for.
        cpu_model_runner._torch_cuda_wrapper = contextlib.nullcontext


def _asynchronous(check: Callable[..., None]) -> Callable[..., None]:
    def checked(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    return checked
