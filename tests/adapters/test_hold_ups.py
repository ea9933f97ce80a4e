"""What held up the engine's process is told apart, and travels with the step that it delayed."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.adapters.attached import hold_ups
from stepscope.engine.adapters.attached.hold_ups import HoldUps
from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.protocol.wire import Admitted, HoldUp
from tests.adapters.conftest import Attach
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.test_vllm_schedules import Played
from tests.support.waiting import wait_for

MS = 1_000_000
WATCHED = textwrap.dedent("""
    import sys, threading, time
    from stepscope.engine.adapters.attached.hold_ups import HoldUps
    from stepscope.engine.adapters.attached.hooks import Hooks
    held = HoldUps()
    held.open(Hooks())
    begins, ends = threading.Event(), threading.Event()
    def pump():
        while not ends.is_set():
            held.pumping()
            begins.set()
            ends.wait(0.01)
    thread = threading.Thread(target=pump)
    thread.start()
    begins.wait()
    for line in sys.stdin:
        rows = held.take(time.monotonic_ns()) or []
        print([row for row in rows if row.kind == "stopped"], flush=True)
    ends.set()
    thread.join()
""")


class Counted:
    """What Linux would have counted of the pump's thread and the engine's, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = self.num_faults = 0
        self.pump = self.engine = hold_ups.ThreadTimes(0, 0, 0)
        self.held = HoldUps()
        self.held._pump, self.held._engine = -1, -2
        times = {-1: lambda: self.pump, -2: lambda: self.engine}
        usage = lambda _: SimpleNamespace(ru_majflt=self.num_faults)  # noqa: E731
        monkeypatch.setattr(hold_ups, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(hold_ups, "read_times", lambda thread: times[thread]())
        monkeypatch.setattr(hold_ups.resource, "getrusage", usage)
        self.held.pumping()

    def after(self, ms: int, *, waited_ms: int = 0, num_runs: int = 1) -> list[HoldUp] | None:
        self.now_ns += ms * MS
        ran, waited, runs = self.pump
        self.pump = hold_ups.ThreadTimes(ran + MS, waited + waited_ms * MS, runs + num_runs)
        self.held.pumping()
        return self.held.take(self.now_ns)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_a_process_that_gets_sigstop_says_for_how_long_it_was_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "[]\n"
        os.kill(child.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{child.pid}/task")
        wait_for(lambda: {s.read_text("utf-8").split()[2] for s in tasks.glob("*/stat")} == {"T"})
        since_ns = hold_ups.monotonic_ns()
        wait_for(lambda: hold_ups.monotonic_ns() > since_ns + 2 * hold_ups.STOPPED_NS)
        stopped_ns = hold_ups.monotonic_ns() - since_ns
        os.kill(child.pid, signal.SIGCONT)
        print(file=child.stdin, flush=True)
        (row,) = eval(child.stdout.readline(), {"HoldUp": HoldUp})
        assert row.ns >= stopped_ns
        assert row.start_ns <= since_ns


def test_a_pump_that_neither_ran_nor_waited_was_stopped(counted: Counted) -> None:
    assert counted.after(50) is None
    counted.num_faults = 5_000
    assert counted.after(2_000) == [HoldUp("stopped", 50 * MS, 2_000 * MS, "5,000 pages")]
    assert counted.after(2_000, waited_ms=1_950) is None
    assert counted.after(2_000, num_runs=400) is None  # each 5 ms it asks for Python's lock
    counted.held.pump_rests()
    assert counted.after(2_000) is None  # it may have waited for vLLM's thread
    counted.now_ns += 2_000 * MS  # it was stopped after it had looked, and finds the engine quiet
    counted.held.pump_rests()
    assert counted.after(50) == [HoldUp("stopped", 8_050 * MS, 2_000 * MS)]


def test_a_stop_counts_for_the_step_that_it_delayed_not_the_one_before(counted: Counted) -> None:
    """The pump reads a step's notes late: it last ran before the step, and next after the stop."""
    counted.now_ns += 12_000 * MS
    counted.held.pumping()
    assert counted.held.take(30 * MS) is None  # these tokens came before the stop
    assert counted.held.take(12_005 * MS) == [HoldUp("stopped", 0, 12_000 * MS)]
    counted.now_ns += 12_000 * MS
    counted.held.pumping()  # and vLLM's thread ran before the pump, when the process went on
    assert counted.held.take(23_998 * MS) == [HoldUp("stopped", 12_000 * MS, 12_000 * MS)]


def test_a_step_in_which_the_engines_thread_had_no_processor_says_so(counted: Counted) -> None:
    assert counted.after(100) is None
    counted.engine = hold_ups.ThreadTimes(0, 40 * MS, 3)
    assert counted.after(100) == [HoldUp("descheduled", 160 * MS, 40 * MS)]
    counted.engine = hold_ups.ThreadTimes(0, 42 * MS, 3)
    assert counted.after(100) is None  # two of a hundred milliseconds


def test_garbage_collection_on_the_engines_thread_is_told_with_its_generation() -> None:
    held = HoldUps()
    held.open(Hooks())
    with closing(held):
        many: list[list[object]] = [[] for _ in range(200_000)]
        gc.collect()
        assert many.pop() == []
        rows = [row for row in held.take(hold_ups.monotonic_ns()) or () if row.kind == "gc"]
        assert "generation 2" in {row.detail for row in rows}
    assert held._collect not in gc.callbacks


def test_a_kernel_that_triton_compiles_on_vllms_thread_travels_with_its_step(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    before = lambda **each: told.append(each)  # noqa: E731 - what another tool listens with
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=before))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)  # type: ignore[arg-type]
    source, times = SimpleNamespace(name="_fwd_kernel"), SimpleNamespace(total=345_678)

    def compile_once(scheduler: PlayedScheduler, line: dict[str, Any]) -> None:
        if line["call"] == "schedule" and not told:
            knobs.compilation.listener(src=source, times=times, cache_hit=False)

    played = Played(attach, "0.32.0", "chunked", each=compile_once)
    rows = [row for step in played.steps for row in step.hold_ups or () if row.kind == "jit"]
    assert [(row.ns, row.detail) for row in rows] == [(345_678_000, "_fwd_kernel")]
    assert [each["src"] for each in told] == [source]
    assert knobs.compilation.listener is before


def test_tokens_that_a_connector_loads_are_told_with_the_admission(attach: Attach) -> None:
    loaded = []

    def load(scheduler: PlayedScheduler) -> None:
        scheduler.connector, schedule = object(), scheduler.schedule

        def schedule_with_loads(throttle_prefills: bool = False) -> SimpleNamespace:
            output = schedule(throttle_prefills)
            for new in output.scheduled_new_reqs:
                loaded.append(new.num_computed_tokens // 2)
                scheduler.kv_cache_manager.allocate_slots(
                    scheduler._all[new.req_id], num_external_computed_tokens=loaded[-1]
                )
            return output

        scheduler.schedule = schedule_with_loads  # type: ignore[method-assign]

    admitted = Played(attach, "0.32.0", "prefix", prepare=load).of(Admitted)
    assert any(loaded)
    assert [event.num_loaded_tokens for event in admitted] == loaded
    assert not any(event.load_ns or event.is_loaded_early for event in admitted)


@pytest.mark.parametrize(
    ("is_engines", "ran_ms", "waited_ms", "told"),
    [
        (True, 90, 0, HoldUp("gc", 0, 100 * MS, "generation 2")),
        (True, 40, 60, HoldUp("gc", 0, 40 * MS, "generation 2")),  # the rest had no processor
        (False, 1, 0, HoldUp("gc_elsewhere", 0, 100 * MS, "generation 2 on another thread")),
        (False, 90, 0, None),  # the engine's thread did not need Python's lock
    ],
)
def test_garbage_collection_counts_as_far_as_the_engines_thread_had_to_wait_for_it(
    counted: Counted, is_engines: bool, ran_ms: int, waited_ms: int, told: HoldUp | None
) -> None:
    counted.held._engine_id = threading.get_ident() if is_engines else 0
    counted.held._collect("start", {"generation": 2})
    counted.now_ns += 100 * MS
    counted.engine = hold_ups.ThreadTimes(ran_ms * MS, waited_ms * MS, 1)
    counted.held._collect("stop", {"generation": 2})
    rows = [row for row in counted.held.take(counted.now_ns) or () if row.kind[:2] == "gc"]
    assert rows == ([] if told is None else [told])
