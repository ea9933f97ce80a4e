"""`DeviceTimes`: the GPU time of each step, if vLLM's worker runs in this process.

It records a CUDA event before and after `execute_model`, on the current stream. It reads both when
vLLM has the tokens, so nothing waits for the events.

If the GPU is still busy with the step before, as with asynchronous scheduling (vLLM's default), the
time between the events is the step's own. An idle GPU waits in this time for the host to lay out
the step. Sampling counts where vLLM samples in `execute_model`. With several GPUs, each worker runs
in its own process and the times are unknown. This has not run on a GPU yet.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.vllm.shapes import SchedulerOutput

_WORKER_MODULE = "vllm.v1.worker.gpu_worker"
_MOST = 16  # steps with events; older ones that were never read are dropped


class _Events(NamedTuple):
    begin: Any
    end: Any


class DeviceTimes:
    """Measures the GPU time of each step.

    `execute_model` runs on the engine's thread. Call `take_ns` on any thread.
    """

    def __init__(self, cuda: Any, worker_class: Any) -> None:
        self._cuda = cuda
        self._worker_class = worker_class
        self._timed: dict[int, _Events] = {}

    @classmethod
    def if_here(cls) -> "DeviceTimes | None":
        """Return an instance, or None if no worker of this process uses a GPU."""
        torch, module = sys.modules.get("torch"), sys.modules.get(_WORKER_MODULE)
        if torch is None or module is None or not torch.cuda.is_initialized():
            return None
        return cls(torch.cuda, module.Worker)

    def hook(self, attachment: Attachment) -> None:
        """Time each call of `execute_model`, until stepscope detaches."""
        hooks = attachment.hooks_on(self._worker_class)
        hooks.wrap("execute_model", lambda method: self._around(attachment, method))

    def take_ns(self, out: SchedulerOutput) -> int | None:
        """Return the GPU time of an ended step in ns, and forget the step. None if unknown."""
        events = self._timed.pop(id(out), None)
        if events is None or not events.end.query():
            return None
        took_ms: float = events.begin.elapsed_time(events.end)
        return round(took_ms * 1e6)

    def _around(self, attachment: Attachment, execute: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_execute_model(
            worker: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
        ) -> Any:
            attachment.guard(lambda: self._begin(scheduler_output))
            result = execute(worker, scheduler_output, *args, **kwargs)
            attachment.guard(lambda: self._end(scheduler_output))
            return result

        return stepscope_execute_model

    def _begin(self, out: SchedulerOutput) -> None:
        if not out.total_num_scheduled_tokens:
            return
        for old in list(self._timed)[: 1 - _MOST]:
            self._timed.pop(old, None)
        make = self._cuda.Event
        events = _Events(make(enable_timing=True), make(enable_timing=True))
        events.begin.record()
        self._timed[id(out)] = events

    def _end(self, out: SchedulerOutput) -> None:
        events = self._timed.get(id(out))
        if events is not None:
            events.end.record()
