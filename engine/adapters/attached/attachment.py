"""`Attachment`: connects stepscope to one process of another engine, until it detaches.

The engine's own thread applies commands before it schedules a step. Step records are built on that
thread, or on our background thread (the pump), from what the engine's thread queued in `StepNotes`.
While the engine is idle, or in a long step, the pump applies commands too. A lock keeps the two
threads apart. The pump takes it only after the engine's thread has been quiet for a while, so the
engine hardly ever waits.

The first error in our code detaches stepscope. The thread with the error restores the engine's
methods and values at once, under the lock. The pump then closes sockets and threads, so that the
engine does not wait for them.
"""

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from stepscope.engine.adapters.attached.attached_core import AttachedCore, EngineWatcher, NoIntake
from stepscope.engine.adapters.attached.description import AttachedKnobs
from stepscope.engine.adapters.attached.hooks import Hooks, StepNotes
from stepscope.engine.adapters.attached.reports import ProcessReports
from stepscope.engine.control.server import ControlServer
from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.changes import end_lease_if_due
from stepscope.engine.loop.inbox import CommandTime
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_watcher import LOOK_S, StepWatcher
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.engine.transport.gate import gate_of
from stepscope.engine.transport.local_engines import sweep

REPLAY_MESSAGES = 20_000
REPLAY_BYTES = 64 * 1024 * 1024
PUMP_S = 0.05
QUIET_NS = 100_000_000  # the pump applies commands after the engine's thread was away this long
_ADVICE = "set STEPSCOPE_ENDPOINT to another name"


class Attachment:
    """Owns the sockets, threads and hooks of stepscope in one process of the engine.

    Args:
        hook: wraps the engine's methods, with `hooks`.
        reports: what the engine's other processes tell; None: they tell nothing.

    Attributes:
        lock: held while the engine changes what we read, and while we read it. Reentrant, because
            the engine calls some of the wrapped methods from within others.
        notes: what the engine's thread saw and nobody has processed yet. Use the core or the
            recorder only inside `with notes.done()`. Take `lock` first if both are needed.
        is_attached: False once stepscope has detached or the engine was shut down.

    Raises:
        ConfigError: the endpoint is not available, or other machines can reach it and no key is
            authorised. The engine is then unchanged.
    """

    def __init__(
        self,
        engine: str,
        log: logging.Logger,
        endpoint: Endpoint,
        info: EngineInfo,
        watcher: EngineWatcher,
        knobs: AttachedKnobs,
        hook: "Callable[[Attachment], object]",
        reports: ProcessReports | None = None,
    ) -> None:
        self._engine, self._log = engine, log
        self.watcher, self.knobs, self._reports = watcher, knobs, reports
        self.lock = threading.RLock()
        self.notes = StepNotes()
        self._command_time = CommandTime(monotonic_ns)
        self._ended = threading.Event()
        self._seen_ns = 0  # when the engine's thread was here last
        self._next_tend_ns = 0
        self.hooks = Hooks()
        self.is_attached = True
        sweep()
        with contextlib.ExitStack() as stack:
            gate = stack.enter_context(gate_of("", endpoint))
            stack.enter_context(EndpointLock(endpoint, gate and gate.local, endpoint.name, _ADVICE))
            self.publisher = Publisher(endpoint.telemetry, REPLAY_MESSAGES, REPLAY_BYTES, gate)
            stack.callback(self.publisher.close)
            tally = ControlTally(gate)
            self.core = AttachedCore(engine, info, watcher, knobs, self.publisher, tally)
            intake, replay = NoIntake(engine), self.publisher.replay
            control = ControlServer(endpoint.control, self.core, intake, None, replay, gate)
            control.start()
            stack.callback(control.close)
            stack.callback(self.hooks.restore)
            if reports is not None:
                reports.open()
                stack.callback(reports.close)
            hold_ups = watcher.recorder.hold_ups
            hold_ups.open(self.hooks)
            stack.callback(hold_ups.close)
            hook(self)
            self._to_close = stack.pop_all()
        self._pump = threading.Thread(target=self._run, name="stepscope", daemon=True)
        self._pump.start()
        log.info("stepscope is attached: stepscope top %s", endpoint.control)

    # On the engine's thread

    def seen(self) -> int:
        """Note that the engine's thread is active, and return the monotonic time."""
        self._seen_ns = now_ns = monotonic_ns()
        return now_ns

    def tend_if_due(self) -> int:
        """As `seen`, but first tend to what is due. Call it between steps, under the lock."""
        self._seen_ns = now_ns = monotonic_ns()
        if now_ns < self._next_tend_ns and not self.core.inbox.qsize():
            return now_ns
        with self.notes.done():
            self._tend()
        return monotonic_ns()

    def note(self, ours: Callable[[], object]) -> None:
        """Process the queued notes, then call `ours`, under the lock; see `guard`."""

        def when_read() -> None:
            with self.notes.done():
                ours()

        with self.lock:
            self.guard(when_read)

    def guard(self, ours: Callable[[], object]) -> None:
        """Call `ours`, without the lock, unless detached. After an error stepscope detaches."""
        if self.is_attached:
            try:
                ours()
            except Exception as error:  # noqa: BLE001
                with self.lock:
                    self.fail(error)

    def around(
        self,
        method: Callable[..., Any],
        after: Callable[..., object],
        before: Callable[[], Any] | None = None,
    ) -> Callable[..., Any]:
        """Return a wrapper around `method`, after which `after` is called as by `note`.

        It gets what `before` has returned (None: when `method` was called), the result of `method`,
        and its arguments.
        """
        begin = before or self.seen

        def stepscope_around(*args: Any, **kwargs: Any) -> Any:
            begun = begin()
            result = method(*args, **kwargs)
            self.note(lambda: after(begun, result, *args, **kwargs))
            return result

        return stepscope_around

    def before_end(self, end: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that closes stepscope, then calls `end`, which shuts the engine down."""

        def stepscope_before_end(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return end(*args, **kwargs)

        return stepscope_before_end

    def fail(self, error: Exception) -> None:
        """Log the error and detach for good. The engine goes on with its own methods and values."""
        if not self.is_attached:
            return
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = "".join(f" at {frame.name}, line {frame.lineno}" for frame in where)
        said = "stepscope has detached itself, %s goes on: %s: %s%s"
        self._log.warning(said, self._engine, type(error).__name__, error, place)
        self._restore()
        self._ended.set()
        self.notes.wake()

    # Between steps: the lock and the notes are held

    def _tend(self) -> None:
        """Apply commands; publish the engine's info and its state, if they are due."""
        core = self.core
        self._command_time.take(core.inbox, core.take)
        if not self.knobs.is_deferred:
            end_lease_if_due(core)
        core.snapshots.serve()
        core.audit.publish_if_due()
        core.heartbeat.publish(idle=not core.has_work)
        self._next_tend_ns = min(core.snapshots.due_ns, core.heartbeat.next_status_ns)

    def _restore(self) -> None:
        self.is_attached = False
        self.hooks.restore()
        self.knobs.restore()

    # The end

    def close(self) -> None:
        """Publish that the engine stops, detach, and free the endpoint. Takes 2 s at most."""
        with self.lock:
            if self.is_attached:
                with contextlib.suppress(Exception), self.notes.done():
                    self._read()
                    self.core.audit.publish_all()
                    self.core.heartbeat.publish_status("stopped")
                self._restore()
        self._ended.set()
        self.notes.wake()
        self._pump.join(timeout=2)

    def _read(self) -> None:
        with self.notes.done():
            if self._reports is not None:
                self._reports.read()

    def _run(self) -> None:
        """Run the pump: build records, apply commands while the engine is quiet, and clean up."""
        steps = StepWatcher(self.watcher.recorder, self.publisher.publish)
        next_look_s = 0.0
        hold_ups = self.watcher.recorder.hold_ups

        def tend_in_quiet() -> None:
            nonlocal next_look_s
            with self.notes.done():
                self._tend()
                if time.monotonic() >= next_look_s:
                    next_look_s = time.monotonic() + LOOK_S
                    steps.look()
            self._next_tend_ns = 0  # so the next step publishes that the engine runs again

        while not self._ended.is_set():
            self.notes.wait(PUMP_S)
            self.guard(hold_ups.pumping)
            self.guard(self._read)
            if monotonic_ns() - self._seen_ns < QUIET_NS:
                continue
            hold_ups.pump_rests()
            with self.lock:
                self.guard(tend_in_quiet)
            self.guard(hold_ups.pumping)
        try:
            self._to_close.close()
        except Exception as error:  # noqa: BLE001 - nothing is left to detach
            self._log.debug("closing stepscope: %s", error)
