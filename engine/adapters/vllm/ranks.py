"""Times steps of vLLM on its ranks (workers) and on the GPU, for the records of these steps.

Each worker tells of a step as soon as its forward pass has ended (`WorkerWatch`); sampling comes
later, so the reports are there when the step is recorded (`RankTable`). The scheduler output
carries a number to the workers, so a lost report shifts no other.

Nothing here waits for a device. On an accelerator the times are those of the host, which launches
the work, and the time in collectives is unknown.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from stepscope.engine.adapters.attached.description import rank_endpoint
from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.adapters.attached.reports import RankReport, ReportSender
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.versions import SchedulerOutput
from stepscope.engine.protocol.wire import RankTimes
from stepscope.engine.transport.endpoints import reports_path

if TYPE_CHECKING:  # the workers need no sockets of an engine
    from stepscope.engine.adapters.attached.attachment import Attachment

_STAMP = "_stepscope_step"  # the attribute of a scheduler output that numbers it
_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gatherv", "gather", "reduce_scatter", "reduce_scatterv",
    "dispatch", "combine",
)  # fmt: skip


def watch(worker: Any, endpoint: str) -> None:
    """Watch a worker that has just joined its groups, if it is one of several of its engine."""
    parallel = worker.vllm_config.parallel_config
    if versions.rank_sizes(parallel) != (1, 1):
        rank = versions.data_parallel_rank(worker)
        at = rank_endpoint(endpoint, rank, parallel.data_parallel_size)
        WorkerWatch(worker, reports_path(at))


class WorkerWatch:
    """Follows the steps of one worker, for the engine with the socket at `path`."""

    def __init__(self, worker: Any, path: Path) -> None:
        from vllm.distributed import parallel_state

        self._number: int = worker.rank
        self._sender: ReportSender | None = ReportSender([path])
        self._wait_ns = 0
        self._is_waiting = False
        self._sent_ns = 0  # when the result of the step went to the next stage
        wrap = Hooks().wrap
        wrap(worker, "execute_model", self._around_forward)
        for name in ("isend_tensor_dict", "send_tensor_dict"):
            wrap(parallel_state.get_pp_group(), name, self._around_send)
        # vLLM's functions that return them raise where it has made none.
        found = [getattr(parallel_state, name, None) for name in ("_TP", "_DP", "_EP")]
        groups = [each for each in found if each is not None and each.world_size > 1]
        # Only on a CPU does the host wait in collectives; a compiler would trace them.
        config = worker.vllm_config
        is_eager = not config.compilation_config.mode and config.device_config.device_type == "cpu"
        self._knows_waits = is_eager or not groups
        for group in groups if is_eager else ():
            for name in _COLLECTIVES:
                wrap(group.device_communicator, name, self._around_collective)

    def _around_forward(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_execute_model(out: Any, *args: Any, **kwargs: Any) -> Any:
            step, begin_ns = getattr(out, _STAMP, None), monotonic_ns()
            self._wait_ns = self._sent_ns = 0
            result = execute(out, *args, **kwargs)
            if step is not None and self._sender is not None:
                took_ns = (self._sent_ns or monotonic_ns()) - begin_ns
                wait_ns = self._wait_ns if self._knows_waits else None
                try:
                    self._sender.put(RankReport(step, self._number, begin_ns, took_ns, wait_ns))
                    self._sender.flush()
                except Exception as error:  # noqa: BLE001 - vLLM never sees it
                    self._sender = None
                    log = logging.getLogger("vllm.stepscope")
                    log.warning("stepscope watches this worker no more: %r", error)
            return result

        return stepscope_execute_model

    def _around_send(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_send(*args: Any, **kwargs: Any) -> Any:
            begin_ns = monotonic_ns()
            works = send(*args, **kwargs)  # none: it has waited until the next stage got it all
            self._sent_ns = self._sent_ns or (monotonic_ns() if works else begin_ns)
            return works

        return stepscope_send

    def _around_collective(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_collective(*args: Any, **kwargs: Any) -> Any:
            if self._is_waiting:  # it is a part of another, or wrapped for two groups
                return method(*args, **kwargs)
            self._is_waiting, begin_ns = True, monotonic_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self._is_waiting = False
                self._wait_ns += monotonic_ns() - begin_ns

        return stepscope_collective


class RankTable:
    """The reports of all ranks. Only `stamp` is for the engine's thread.

    The `stage_size` ranks of a pipeline stage compute side by side; their numbers follow one
    another. Each stage gets its input from the one before; the last one samples.
    """

    def __init__(self, stage_size: int, num_stages: int) -> None:
        self._stage_size, self._num_stages = stage_size, num_stages
        self._next_stamp = 0
        self._told: dict[int, dict[int, RankReport]] = {}
        self._ended_ns: dict[int, int] = {}  # by rank, in the step before
        self._tokens_ns = 0

    def stamp(self, out: Any) -> None:
        """Number a scheduler output that the workers are about to get."""
        self._next_stamp += 1
        try:  # noqa: SIM105 - vLLM's thread has no time for a context manager
            setattr(out, _STAMP, self._next_stamp)
        except (AttributeError, TypeError):  # it takes none: the times are unknown
            pass

    def add(self, report: RankReport) -> None:
        """Keep a report until its step ends."""
        if 0 <= report.number < self._stage_size * self._num_stages:
            self._told.setdefault(report.step, {})[report.number] = report

    def of(self, out: Any, start_ns: int, tokens_ns: int) -> list[RankTimes] | None:
        """Return the times of all ranks in a step, which has ended; None if one has not told.

        Call it for each step, in order, with the times when the engine began to schedule it, and
        when it had its tokens.
        """
        step = getattr(out, _STAMP, -1)
        told = self._told.get(step, {})
        self._told = {later: each for later, each in self._told.items() if later > step}
        idle_ns = max(0, start_ns - self._tokens_ns)
        self._tokens_ns = tokens_ns
        if len(told) != self._stage_size * self._num_stages:
            self._ended_ns = {}
            return None
        return list(self._times(told, idle_ns))

    def _times(self, told: dict[int, RankReport], idle_ns: int) -> Iterator[RankTimes]:
        ready_ns = 0
        for stage in range(self._num_stages):
            first = stage * self._stage_size
            ranks = [told[number] for number in range(first, first + self._stage_size)]
            # A rank that begins late has used its time for something else.
            ready_ns = max(ready_ns, min(each.begin_ns for each in ranks))
            for each in ranks:
                done_ns, empty_ns = each.begin_ns + each.forward_ns, None
                work_ns = max(0, done_ns - ready_ns - (each.wait_ns or 0))
                if (before_ns := self._ended_ns.get(each.number)) is not None:
                    empty_ns = max(0, done_ns - before_ns - idle_ns - work_ns)
                yield RankTimes(stage, work_ns, each.wait_ns, empty_ns)
                is_last = stage == self._num_stages - 1
                self._ended_ns[each.number] = self._tokens_ns if is_last else done_ns
            ready_ns = max(each.begin_ns + each.forward_ns for each in ranks)


_WORKER_MODULE = "vllm.v1.worker.gpu_worker"
_MOST = 16  # steps with events; older ones that were never read are dropped


class DeviceTimes:
    """Measures the GPU time of each step, if vLLM's worker runs in this process.

    It records a CUDA event before and after `execute_model`, on the current stream, and reads both
    when vLLM has the tokens. If the GPU is still busy with the step before, as with asynchronous
    scheduling (vLLM's default), the time between them is the step's own; else it includes waiting
    for the host to lay out the step. Sampling counts where vLLM samples in `execute_model`. This
    has not run on a GPU yet.

    `execute_model` runs on the engine's thread. Call `take_ns` on any thread.
    """

    def __init__(self, cuda: Any, worker_class: Any) -> None:
        self._cuda = cuda
        self._worker_class = worker_class
        self._timed: dict[int, tuple[Any, Any]] = {}  # the events of each output, by its id

    @classmethod
    def if_here(cls) -> "DeviceTimes | None":
        """Return an instance, or None if no worker of this process uses a GPU."""
        torch, module = sys.modules.get("torch"), sys.modules.get(_WORKER_MODULE)
        if torch is None or module is None or not torch.cuda.is_initialized():
            return None
        return cls(torch.cuda, module.Worker)

    def hook(self, attachment: "Attachment") -> None:
        def around(execute: Callable[..., Any]) -> Callable[..., Any]:
            def stepscope_execute_model(
                worker: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
            ) -> Any:
                attachment.guard(lambda: self._begin(scheduler_output))
                result = execute(worker, scheduler_output, *args, **kwargs)
                attachment.guard(lambda: self._end(scheduler_output))
                return result

            return stepscope_execute_model

        attachment.hooks.wrap(self._worker_class, "execute_model", around)

    def take_ns(self, out: SchedulerOutput) -> int | None:
        """Return the GPU time of an ended step in ns, and forget the step. None if unknown."""
        begin, end = self._timed.pop(id(out), (None, None))
        if end is None or not end.query():
            return None
        took_ms: float = begin.elapsed_time(end)
        return round(took_ms * 1e6)

    def _begin(self, out: SchedulerOutput) -> None:
        if not out.total_num_scheduled_tokens:
            return
        for old in list(self._timed)[: 1 - _MOST]:
            self._timed.pop(old, None)
        make = self._cuda.Event
        begin, end = make(enable_timing=True), make(enable_timing=True)
        begin.record()
        self._timed[id(out)] = begin, end

    def _end(self, out: SchedulerOutput) -> None:
        if (events := self._timed.get(id(out))) is not None:
            events[1].record()
