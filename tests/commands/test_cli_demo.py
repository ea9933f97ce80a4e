"""`stepscope demo` ends cleanly, however it is ended.

How a demo and its engine's process end does not depend on the model: most demos here simulate one.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from stepscope.engine.client.client import ControlClient, EngineUnreachable
from stepscope.engine.protocol.wire import Audited
from stepscope.engine.protocol.workload_spec import WorkloadSpec
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.workload.arrivals import describe
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.state.audit_text import change_text
from stepscope.tui.cli.dashboards.demo import WORKLOAD, workload_of, workload_text
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.terminal import OURSELVES
from tests.support.waiting import wait_for

WAIT_S = 90.0
SIMULATED = ("demo", "--simulate", "h100")


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def start(runtime: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `stepscope ARGUMENTS`; kills processes that still run after the test."""
    started: list[subprocess.Popen[str]] = []
    (runtime / "csv.py").write_text("raise ImportError('a module of the user')")  # hides none

    def stepscope(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*OURSELVES, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=runtime,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "XDG_CONFIG_HOME": str(runtime)},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield stepscope
    for process in started:
        process.kill()
        process.wait()


def demo_engine(runtime: Path, process: "subprocess.Popen[str]") -> int:
    """Process id of a demo's engine, once it runs its workload."""
    endpoint = Endpoint(f"ipc://{runtime}/stepscope/demo-{process.pid}")
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, process.communicate()
        try:
            with ControlClient(endpoint, timeout_s=1.0) as client:
                snapshot = client.snapshot()
        except EngineUnreachable:
            time.sleep(0.1)
            continue
        if snapshot.step > 0:
            return snapshot.info.pid
    raise AssertionError("the engine of the demo never ran a step")


def wait_until_gone(pid: int) -> None:
    wait_for(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )


def test_a_headless_demo_records_and_sums_up_a_session_without_gaps(
    start: Callable[..., "subprocess.Popen[str]"], runtime: Path
) -> None:
    process = start("demo", "--headless", "--seconds", "1.5", "--record", "out.mcap")
    stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, stderr
    assert re.search(r"^workload +up to 12 requests under way at once: ", stdout, re.M)
    assert re.search(r"^engine +decode of 8 streams [\d.,]+ ms a step, prefill of", stdout, re.M)
    assert re.search(r"^steps +[\d,]+ in [\d.]+ s", stdout, re.MULTILINE)
    assert re.search(r"^tokens +out [\d.,]+ tokens/s", stdout, re.MULTILINE)
    assert len(re.findall(r"^(?:TTFT|ITL) +p50 [\d.,]+ ms  p99 [\d.,]+ ms", stdout, re.M)) == 2
    assert re.search(r"^mixed +[\d.]+ % of the steps", stdout, re.MULTILINE)
    assert re.search(r"^gaps +0$", stdout, re.MULTILINE)
    assert (runtime / "out.mcap").stat().st_size > 1000
    assert "loading weights" in stderr  # plain lines where there is no terminal
    assert "\r" not in stderr
    assert list((runtime / "stepscope").iterdir()) == []


def test_the_engine_of_a_demo_ends_however_the_demo_ends(
    start: Callable[..., "subprocess.Popen[str]"], runtime: Path
) -> None:
    signals = (signal.SIGKILL, signal.SIGHUP)
    command = (*SIMULATED, "--headless", "--seconds", "600", "--rate", "5")  # busy at once
    demos = [(start(*command), number) for number in signals]
    engines = [demo_engine(runtime, process) for process, _ in demos]
    for process, number in demos:
        process.send_signal(number)
    for (process, number), engine in zip(demos, engines, strict=True):
        _, stderr = process.communicate(timeout=WAIT_S)
        wait_until_gone(engine)
        assert process.returncode != 0, number
        assert "Traceback" not in stderr
    assert list((runtime / "stepscope").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_headless_demo_says_so_and_still_sums_up_its_session(
    start: Callable[..., "subprocess.Popen[str]"], runtime: Path, number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    try:
        process = start(
            *(*SIMULATED, "--headless", "--seconds", "600", "--record", "out.mcap"),
            *("--rate", "2.25"),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    engine = demo_engine(runtime, process)
    time.sleep(1.0)  # some steps
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, stderr
    assert re.search(r"^stepscope: error: interrupted after \d+ of 600 s$", stderr, re.MULTILINE)
    assert "running the demo" in stderr
    assert re.search(r"^workload +2\.25 requests/s: ", stdout, re.MULTILINE)
    assert re.search(r"^steps +[\d,]+ in [\d.]+ s", stdout, re.MULTILINE)
    assert re.search(r"^gaps +0$", stdout, re.MULTILINE)
    with Recording(runtime / "out.mcap") as recording:
        assert recording.last_step is not None
        assert not recording.truncated
    wait_until_gone(engine)
    assert list((runtime / "stepscope").iterdir()) == []


def test_a_demo_ended_while_its_model_loads_leaves_nothing_behind(
    start: Callable[..., "subprocess.Popen[str]"], runtime: Path
) -> None:
    process = start("demo", "--headless", "--seconds", "600")
    lock = runtime / "stepscope" / f"demo-{process.pid}.lock"
    wait_for(lock.exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert list((runtime / "stepscope").iterdir()) == []


def test_ctrl_c_in_the_dashboard_of_a_demo_ends_its_engine_too(
    terminal: Callable[..., Any], runtime: Path
) -> None:
    screen = terminal(
        *(sys.executable, "-m", "stepscope.tui.cli", *SIMULATED),
        XDG_RUNTIME_DIR=str(runtime),
        XDG_CONFIG_HOME=str(runtime),
    )
    screen.wait_for(r"LIVE.*demo", WAIT_S)
    (engine,) = psutil.Process(screen.process.pid).children()
    screen.send("\x03")
    assert screen.wait_for_exit(WAIT_S) == 0
    wait_until_gone(engine.pid)
    assert list((runtime / "stepscope").iterdir()) == []


def test_a_demo_of_a_folder_that_is_no_model_ends_with_the_engines_error(
    start: Callable[..., "subprocess.Popen[str]"], runtime: Path
) -> None:
    process = start("demo", "--headless", "--model", str(runtime))
    _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    last = stderr.splitlines()[-1]
    assert last.startswith("stepscope: error: the engine ended")
    assert str(runtime) in last
    assert "Traceback" not in stderr


def test_a_rate_is_checked_and_a_closed_loop_told_by_how_many_are_under_way() -> None:
    for wrong in ("0", "-1", "much", "inf", "nan", "10001", ""):
        with pytest.raises(WrongUsage, match="--rate: expected a number above 0 and of at most"):
            workload_of(wrong)
    assert workload_of(None) == WORKLOAD
    assert workload_text(WORKLOAD).startswith("up to 12 requests under way at once: chats of 96 ")
    assert workload_text(workload_of("0.5")).startswith("at most 12 under way, 0.5 requests/s: ")


_QUICKER, _ENDLESS = replace(WORKLOAD, rate=0.5), replace(WORKLOAD, max_concurrency=None)
_CHATS = replace(WORKLOAD, document_share=0.0)
_TOGETHER = replace(_ENDLESS, rate=9.0, max_concurrency=3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (None, WORKLOAD, f"started a workload of {describe(WORKLOAD)}"),
        (WORKLOAD, None, f"stopped the workload of {describe(WORKLOAD)}"),
        (None, None, "stopped the workload, but none was running"),
        (WORKLOAD, WORKLOAD, f"started the same workload anew: {describe(WORKLOAD)}"),
        (WORKLOAD, _QUICKER, "workload: 100→0.5 requests/s"),
        (WORKLOAD, _ENDLESS, "workload: no longer at most 12 under way"),
        (_ENDLESS, _TOGETHER, "workload: 100 requests/s→at most 3 under way, 9 requests/s"),
        (_CHATS, WORKLOAD, "workload: now also 70% documents of 896"),
    ],
)
def test_the_audit_trail_names_the_fields_that_a_workload_change_changed(
    old: WorkloadSpec | None, new: WorkloadSpec | None, said: str
) -> None:
    """A full description of a mix is longer than its line."""
    before, after = (
        {"workload": "none" if each is None else describe(each)} for each in (old, new)
    )
    entry = Audited(number=2, command="SetWorkload", who="me", time_ns=1, old=before, new=after)
    assert change_text(entry) == said
