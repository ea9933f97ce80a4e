"""An attached vLLM that is told to end says so and leaves no file."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.engine.adapters.vllm import orderly_end
from tests.attached.published import Collector
from tests.support.waiting import wait_for

# Like vLLM's engine core: it handles both signals, and hears of them when its device lets it.
ENGINE = """
import ctypes, signal, sys
from stepscope.engine.adapters.vllm.attachment import attach
from tests.adapters.played_vllm import PlayedScheduler

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
scheduler = PlayedScheduler("0.32.0", "chunked")
scheduler.vllm_config.shutdown_timeout = int(sys.argv[2])
attach(scheduler, sys.argv[1])
print("attached", flush=True)
while True:
    ctypes.CDLL(None).sleep(30)
"""


def started(endpoint: str, shutdown_timeout: int = 0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ENGINE, endpoint, str(shutdown_timeout)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "attached\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_end_removes_all_files_before_the_engine_hears_of_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    endpoint = f"ipc://{tmp_path}/vllm"
    process = started(endpoint)
    collector = Collector(f"{endpoint}.telemetry")
    try:
        wait_for(lambda: bool(collector.published().statuses), "the first status")
        process.send_signal(number)
        wait_for(lambda: not list(tmp_path.iterdir()), "the files are gone")
        wait_for(lambda: collector.published().statuses[-1].state == "stopped", "it says so")
    finally:
        process.kill()
        process.wait()
        collector.stop()


def test_an_engine_that_lets_requests_end_first_stays_attached_meanwhile(tmp_path: Path) -> None:
    process = started(f"ipc://{tmp_path}/vllm", shutdown_timeout=60)
    try:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert {path.name for path in tmp_path.iterdir()} == {
            "vllm",
            "vllm.reports",
            "vllm.lock",
            "vllm.telemetry",
        }
    finally:
        process.kill()
        process.wait()


class EngineProcess:
    """A process as vLLM's parent sees it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.terminate()

    def join(self, timeout: float) -> None:
        self._process.wait(timeout)

    def kill(self) -> None:
        """What vLLM's parent does: the signal, and no time to follow it."""
        self._process.terminate()
        self._process.kill()


def test_a_parent_that_kills_its_engine_at_once_lets_it_say_first_that_it_stops(
    tmp_path: Path,
) -> None:
    endpoint = f"ipc://{tmp_path}/vllm"
    engine = EngineProcess(started(endpoint))
    collector = Collector(f"{endpoint}.telemetry")
    try:
        wait_for(lambda: bool(collector.published().statuses), "the first status")
        orderly_end.end(endpoint, [engine], engine.kill, at_once=True)
        assert list(tmp_path.iterdir()) == []
        wait_for(lambda: collector.published().statuses[-1].state == "stopped", "it says so")
    finally:
        engine.kill()
        engine.join(5)
        collector.stop()


def test_files_of_an_engine_that_its_parent_kills_are_removed_and_those_of_a_crash_stay(
    tmp_path: Path,
) -> None:
    endpoint = f"ipc://{tmp_path}/vllm"
    crashed = EngineProcess(started(endpoint))
    crashed.kill()
    crashed.join(5)
    orderly_end.end(endpoint, [crashed], lambda: None, at_once=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "vllm",
        "vllm.reports",
        "vllm.lock",
        "vllm.telemetry",
    }
    stuck = EngineProcess(started(endpoint, shutdown_timeout=60))
    orderly_end.end(endpoint, [stuck], stuck.kill, at_once=True)
    assert list(tmp_path.iterdir()) == []
