"""`Attachment`: stepscope inside one vLLM process, from attaching to its end.

vLLM's own thread does almost everything: it makes the records within its steps, and applies
commands before it schedules the next one. While it is idle, or in a long step, the pump thread
answers. A lock keeps the two apart; the pump takes it only when vLLM's thread has been quiet for a
while, so that vLLM hardly ever waits for it.

The first error of ours detaches: vLLM's methods and values are put back at once, under the lock;
sockets and threads are closed by the pump, so that vLLM does not wait for them.
"""

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.attached_core import AttachedCore, NoIntake
from stepscope.engine.adapters.vllm.description import describe, endpoint_of
from stepscope.engine.adapters.vllm.hooks import Hooks
from stepscope.engine.adapters.vllm.knobs import KnobBoard
from stepscope.engine.adapters.vllm.shapes import SchedulerOutput, VllmRequest, VllmScheduler
from stepscope.engine.adapters.vllm.watcher import Watcher
from stepscope.engine.control.server import ControlServer
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_watcher import LOOK_S, StepWatcher
from stepscope.engine.transport.endpoints import EndpointLock
from stepscope.engine.transport.leftovers import sweep

log = logging.getLogger("vllm.stepscope")

REPLAY_MESSAGES = 20_000
REPLAY_BYTES = 64 * 1024 * 1024
PUMP_S = 0.05
QUIET_NS = 100_000_000  # so long vLLM's thread has not been here before the pump does its work
MAX_COMMANDS = 20  # that are applied between two steps


def attach(scheduler: Any, endpoint: str) -> "Attachment":
    """Watch a scheduler that vLLM has just built.

    Args:
        endpoint: as in STEPSCOPE_ENDPOINT.

    Raises:
        Exception: it cannot be watched, or the endpoint cannot be had. Nothing is changed then.
    """
    versions.check(scheduler)
    attachment = Attachment(scheduler, endpoint)
    log.info("stepscope is attached: stepscope top %s", attachment.core.info.control_endpoint)
    return attachment


class Attachment:
    """Everything of ours in one vLLM process.

    Attributes:
        is_attached: False once it has detached itself, or vLLM was shut down.
    """

    def __init__(self, scheduler: VllmScheduler, endpoint_text: str) -> None:
        self._scheduler = scheduler
        # vLLM calls some of these methods from within others.
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._seen_ns = 0  # when vLLM's thread was here last
        self._next_tend_ns = 0
        self.is_attached = True
        self._hooks = Hooks(scheduler)
        self._end_hooks: Hooks | None = None
        self._board = KnobBoard(scheduler)
        self.watcher = Watcher(scheduler)
        endpoint = endpoint_of(scheduler, endpoint_text)
        books = self.watcher.books
        info = describe(
            scheduler, self._board, endpoint, None if books is None else books.num_blocks
        )
        sweep()
        with contextlib.ExitStack() as stack:
            stack.enter_context(EndpointLock(endpoint, None, endpoint.name))
            self._publisher = Publisher(endpoint.telemetry, REPLAY_MESSAGES, REPLAY_BYTES)
            stack.callback(self._publisher.close)
            self.core = AttachedCore(info, scheduler, self.watcher, self._board, self._publisher)
            control = ControlServer(
                endpoint.control,
                self.core,
                NoIntake(),
                None,
                self._publisher.replay,
                None,
                endpoint.telemetry,
            )
            control.start()
            stack.callback(control.close)
            stack.callback(self._unhook)
            self._wrap()
            self._to_close = stack.pop_all()
        self._pump = threading.Thread(target=self._run, name="stepscope", daemon=True)
        self._pump.start()

    # Around vLLM's methods, on its thread

    def _wrap(self) -> None:
        hooks = self._hooks
        hooks.wrap("schedule", self._around_schedule)
        hooks.wrap("update_from_output", self._around_update)
        hooks.wrap("add_request", self._around_add)
        hooks.wrap("finish_requests", lambda method: self._after(method, self._note_ended))
        if hasattr(self._scheduler, "reset_prefix_cache"):
            hooks.wrap(
                "reset_prefix_cache",
                lambda method: self._after(method, self.watcher.forgot_cache),
            )
        if hasattr(self._scheduler, "shutdown"):
            hooks.wrap("shutdown", self._around_shutdown)
        # vLLM clears it first of all when it ends. It then waits for its workers, and may be killed
        # before it comes to its scheduler.
        grammars = getattr(self._scheduler, "structured_output_manager", None)
        if hasattr(grammars, "clear_backend"):
            self._end_hooks = Hooks(grammars)
            self._end_hooks.wrap("clear_backend", self._around_shutdown)

    def _around_schedule(self, schedule: Callable[..., SchedulerOutput]) -> Callable[..., Any]:
        scheduler, watcher, lock = self._scheduler, self.watcher, self._lock
        inbox = self.core.inbox

        def stepscope_schedule(*args: Any, **kwargs: Any) -> SchedulerOutput:
            with lock:
                start_ns = self._seen_ns = monotonic_ns()
                budget = 0
                if self.is_attached:
                    try:
                        if start_ns >= self._next_tend_ns or inbox.qsize():
                            self._tend()
                            start_ns = monotonic_ns()
                        budget = versions.token_budget(scheduler)
                    except Exception as error:  # noqa: BLE001
                        self._fail(error)
                out = schedule(*args, **kwargs)
                if self.is_attached:
                    try:
                        watcher.scheduled(out, start_ns, monotonic_ns(), budget)
                    except Exception as error:  # noqa: BLE001
                        self._fail(error)
                return out

        return stepscope_schedule

    def _around_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        watcher, publisher, lock = self.watcher, self._publisher, self._lock

        def stepscope_update_from_output(out: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            with lock:
                tokens_ns = self._seen_ns = monotonic_ns()
                result = update(out, *args, **kwargs)
                if self.is_attached:
                    try:
                        record = watcher.updated(out, tokens_ns, publisher.num_dropped)
                        if record is not None:
                            publisher.publish(record)
                    except Exception as error:  # noqa: BLE001
                        self._fail(error)
                return result

        return stepscope_update_from_output

    def _around_add(self, add: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_add_request(request: VllmRequest, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                result = add(request, *args, **kwargs)
                if self.is_attached:
                    try:
                        self.watcher.added(request)
                        # A request may end as it comes, or end another one.
                        self.watcher.note_ended()
                    except Exception as error:  # noqa: BLE001
                        self._fail(error)
                return result

        return stepscope_add_request

    def _after(self, method: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
        def stepscope_after(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                result = method(*args, **kwargs)
                if self.is_attached:
                    try:
                        then()
                    except Exception as error:  # noqa: BLE001
                        self._fail(error)
                return result

        return stepscope_after

    def _around_shutdown(self, shutdown: Callable[..., Any]) -> Callable[..., Any]:
        def stepscope_shutdown(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return shutdown(*args, **kwargs)

        return stepscope_shutdown

    def _note_ended(self) -> None:
        self.watcher.note_ended()

    # Between steps: the lock is held

    def _tend(self) -> None:
        """Apply commands; publish the engine's info and vLLM's state, if they are due."""
        core = self.core
        for _ in range(MAX_COMMANDS):
            try:
                core.take(core.inbox.get_nowait())
            except queue.Empty:
                break
        core.end_lease_if_due()
        core.snapshots.serve()
        core.audit.publish_if_due()
        core.heartbeat.publish(idle=not self.watcher.has_work)
        due_ns = core.snapshots.due_ns
        next_ns = core.heartbeat.next_status_ns
        self._next_tend_ns = next_ns if due_ns is None else min(next_ns, due_ns)

    def _fail(self, error: Exception) -> None:
        """Detach for ever. vLLM goes on with its own methods and values."""
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = "".join(f" at {frame.name}, line {frame.lineno}" for frame in where)
        log.warning(
            "stepscope has detached itself, vLLM goes on: %s: %s%s",
            type(error).__name__,
            error,
            place,
        )
        self._restore()
        self._ended.set()

    def _restore(self) -> None:
        self.is_attached = False
        self._unhook()
        self._board.restore()

    def _unhook(self) -> None:
        self._hooks.restore()
        if self._end_hooks is not None:
            self._end_hooks.restore()

    # The end

    def close(self) -> None:
        """vLLM shuts down: say so, and give the endpoint back. Waits for two seconds at most."""
        with self._lock:
            if self.is_attached:
                with contextlib.suppress(Exception):
                    self.core.audit.publish_all()
                    self.core.heartbeat.publish_status("stopped")
                self._restore()
        self._ended.set()
        if threading.current_thread() is not self._pump:
            self._pump.join(timeout=2)

    def _run(self) -> None:
        """The pump: works while vLLM's thread is quiet, and closes everything in the end."""
        steps = StepWatcher(self.watcher, self._publisher.publish)
        next_look_s = 0.0
        while not self._ended.wait(PUMP_S):
            if monotonic_ns() - self._seen_ns < QUIET_NS:
                continue
            with self._lock:
                if not self.is_attached:
                    break
                try:
                    self._tend()
                    if time.monotonic() >= next_look_s:
                        next_look_s = time.monotonic() + LOOK_S
                        steps.look()
                except Exception as error:  # noqa: BLE001
                    self._fail(error)
                    break
                self._next_tend_ns = 0  # the next step publishes that vLLM runs again
        try:
            self._to_close.close()
        except Exception as error:  # noqa: BLE001 - nothing is left to detach
            log.debug("closing stepscope: %s", error)
