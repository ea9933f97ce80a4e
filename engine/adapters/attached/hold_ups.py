"""`HoldUps`: times in which the engine's process or thread was held up, and by what.

- Python's garbage collector calls us when it begins and ends; Triton when it has compiled a kernel
  (vLLM's own `--jit-monitor-mode` uses other hooks).
- Linux counts how long a thread ran, how long it waited for a processor, and how often it ran. Our
  background thread (the pump) sleeps for a short time only. If it did not run once for long, and
  did not wait for a processor either, nothing of the process ran: it was stopped.

What else held a thread up, such as a lock or a device, is not known here.
"""

import contextlib
import gc
import os
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any, NamedTuple

from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.protocol.wire import HoldUp

LEAST_NS = 1_000_000  # a shorter one is not worth a row
STOPPED_NS = 200_000_000  # by which the pump must be late
_RUN_NS = 20_000_000  # a pump that waits for Python's lock runs more often, each 5 ms
_SHARE = 10  # a wait for a processor counts from this part of a step on
_MANY_FAULTS = 100
_MOST = 256  # rows that no step has taken yet


class ThreadTimes(NamedTuple):
    """What Linux has counted of one thread so far; `waited_ns`: for a processor."""

    ran_ns: int
    waited_ns: int
    num_runs: int


class HoldUps:
    """Collects hold-ups, from any thread, until a step's record takes them.

    Off Linux, or without its scheduler's statistics, only garbage collection is told.
    """

    def __init__(self) -> None:
        self._rows: deque[HoldUp] = deque(maxlen=_MOST)
        # Open files that say what Linux counts of the two threads.
        self._engine: int | None = None
        self._engine_id = 0
        self._pump: int | None = None
        self._looking = threading.Lock()
        # When the pump was seen, its times, and the pages read from the disk by then.
        self._last: tuple[int, ThreadTimes, int] | None = None
        self._waited_ns = 0  # by the engine's thread, when last read
        self._tokens_ns = 0
        self._collecting: tuple[int, ThreadTimes | None] | None = None

    def open(self, hooks: Hooks) -> None:
        """Begin. Call it on the engine's thread. `hooks` are the attachment's."""
        self._engine_id = threading.get_ident()
        self._engine = open_times()
        gc.callbacks.append(self._collect)
        compilation = getattr(sys.modules.get("triton.knobs"), "compilation", None)
        hooks.wrap(compilation, "listener", self._around_listener)

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collect)
        with self._looking:
            self._last = None
            for thread in (self._engine, self._pump):
                if thread is not None:
                    os.close(thread)
            self._engine = self._pump = None

    def _add(self, kind: str, start_ns: int, ns: int, detail: str = "") -> None:
        if ns >= LEAST_NS:
            self._rows.append(HoldUp(kind, start_ns, ns, detail))

    def take(self, tokens_ns: int) -> list[HoldUp] | None:
        """Remove and return those of the time before a step's tokens were known; None: none was.

        Call it once for each step, in order.
        """
        last = self._last
        if last is not None and tokens_ns - last[0] > STOPPED_NS:
            self._look()  # the pump has not run yet
        took_ns, self._tokens_ns = tokens_ns - self._tokens_ns, tokens_ns
        with self._looking:
            if self._engine is not None:
                waited_ns = read_times(self._engine).waited_ns
                ns, self._waited_ns = min(waited_ns - self._waited_ns, took_ns), waited_ns
                if ns * _SHARE >= took_ns:
                    self._add("descheduled", tokens_ns - ns, ns)
        found, later = list[HoldUp](), list[HoldUp]()
        while self._rows:
            row = self._rows.popleft()
            # The pump knows the start of a stop, and its end, only about.
            (found if row.start_ns + row.ns // 2 < tokens_ns else later).append(row)
        self._rows.extend(later)
        return found or None

    def _around_listener(self, before: Callable[..., Any] | None) -> Callable[..., Any]:
        def stepscope_listener(*args: Any, **told: Any) -> Any:
            with contextlib.suppress(Exception):
                if threading.get_ident() == self._engine_id:
                    ns = int(told["times"].total) * 1000
                    self._add("jit", monotonic_ns() - ns, ns, str(getattr(told["src"], "name", "")))
            return None if before is None else before(*args, **told)

        return stepscope_listener

    def pumping(self) -> None:
        """Note that the pump runs, and goes on to what takes no lock of the engine's."""
        if self._pump is None and self._engine is not None:
            self._pump = open_times()
        self._look()

    def pump_rests(self) -> None:
        """Note that the pump may now have to wait for the engine's thread."""
        self._look()
        self._last = None

    def _look(self) -> None:
        with self._looking:
            if self._pump is None:
                return
            last, now_ns, pump = self._last, monotonic_ns(), read_times(self._pump)
            num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            self._last = now_ns, pump, num_faults
            if last is None or now_ns - last[0] < STOPPED_NS:
                return
            start_ns, before, num_before = last
            ran_ns, waited_ns, num_runs = (b - a for a, b in zip(before, pump, strict=True))
            ns = now_ns - start_ns - waited_ns
            if ns - ran_ns >= STOPPED_NS and num_runs * _RUN_NS <= ns:
                is_swapped = num_faults - num_before >= _MANY_FAULTS
                detail = f"{num_faults - num_before:,} pages" if is_swapped else ""
                self._add("stopped", start_ns, ns, detail)

    def _collect(self, phase: str, info: Mapping[str, int]) -> None:
        engine = self._engine
        if phase == "start":
            is_long = info["generation"] == 2
            times = read_times(engine) if engine is not None and is_long else None
            self._collecting = monotonic_ns(), times
            return
        if self._collecting is None:
            return
        (start_ns, before), self._collecting = self._collecting, None
        ns = monotonic_ns() - start_ns
        if ns < LEAST_NS:
            return
        ran_ns = waited_ns = 0
        if before is not None and engine is not None:
            after = read_times(engine)
            ran_ns, waited_ns = after.ran_ns - before.ran_ns, after.waited_ns - before.waited_ns
        detail = f"generation {info['generation']}"
        if threading.get_ident() == self._engine_id:
            self._add("gc", start_ns, ns - waited_ns, detail)
        elif before is not None and ran_ns * 2 < ns:
            self._add("gc_elsewhere", start_ns, ns, f"{detail} on another thread")


def open_times() -> int | None:
    """Open what Linux counts of this thread, for any thread to read. None: it counts nothing."""
    try:
        thread = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        return None
    if any(read_times(thread)):
        return thread
    os.close(thread)
    return None


def read_times(thread: int) -> ThreadTimes:
    return ThreadTimes(*map(int, os.pread(thread, 64, 0).split()))
