"""`WorkloadDriver`: sends an engine its own workload, from a thread in the engine."""

import threading
import time
from collections.abc import Callable

from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.workload.arrivals import Corpus, PromptWriter, synthetic

_RECHECK_S = 0.05  # how often a delayed arrival checks whether there is room


class _WorkloadRun:
    def __init__(self, spec: WorkloadSpec) -> None:
        self.spec = spec
        self.stopped = threading.Event()
        self.lock = threading.Lock()


class WorkloadDriver:
    """Starts, replaces and stops a synthetic mix of requests.

    Args:
        submit: queues one request without waiting; called on the driver's thread.
        num_unfinished: returns the engine's unfinished requests, for `max_concurrency`.
        speed: seconds of the engine's time for each second of real time.
    """

    def __init__(
        self,
        submit: Callable[[Submit], None],
        *,
        chars_per_token: float,
        max_model_len: int,
        num_unfinished: Callable[[], int] = lambda: 0,
        speed: float = 1.0,
    ) -> None:
        self._submit = submit
        self._chars_per_token = chars_per_token
        self._max_model_len = max_model_len
        self._num_unfinished = num_unfinished
        self._speed = speed
        self._run: _WorkloadRun | None = None
        self._writer: PromptWriter | None = None

    @property
    def spec(self) -> WorkloadSpec | None:
        """The mix that runs; None if none was started, or it has ended."""
        run = self._run
        return None if run is None or run.stopped.is_set() else run.spec

    def set(self, spec: WorkloadSpec | None) -> None:
        """Stop the current mix and start `spec`, if any. The old mix submits nothing after this."""
        if self._run is not None:
            self._run.stopped.set()
            with self._run.lock:  # wait for an arrival that is just being submitted
                self._run = None
        if spec is None:
            return
        self._run = _WorkloadRun(spec)
        threading.Thread(
            target=self._arrive, args=(self._run,), name="workload", daemon=True
        ).start()

    def close(self) -> None:
        self.set(None)

    def _arrive(self, run: _WorkloadRun) -> None:
        if self._writer is None:
            self._writer = PromptWriter(Corpus.english(), self._chars_per_token)
        start_s = time.monotonic()
        for arrival in synthetic(run.spec, self._writer, self._max_model_len):
            offset_s = arrival.offset_s / self._speed
            if run.stopped.wait(max(0.0, start_s + offset_s - time.monotonic())):
                return
            due_s = time.monotonic()
            while self._is_full(run.spec):
                if run.stopped.wait(_RECHECK_S):
                    return
            # A delay moves all later arrivals, too, so that no burst follows.
            start_s += time.monotonic() - due_s
            with run.lock:
                if run.stopped.is_set():
                    return
                self._submit(arrival.submit())
        run.stopped.set()

    def _is_full(self, spec: WorkloadSpec) -> bool:
        return spec.max_concurrency is not None and self._num_unfinished() >= spec.max_concurrency
