"""Commands that are started while their engine still loads its model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.local_engines import starting_pid
from stepscope.recordings.file.reader import Recording
from tests.support.ports import free_port

ENGINE = Path(__file__).parents[1] / "support" / "engines" / "simulated_engine.py"
WAIT_S = 30.0


@contextmanager
def _starting_engine(address: str, go: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that holds its address, and listens once the file `go` exists."""
    with subprocess.Popen([sys.executable, str(ENGINE), address, "", str(go)]) as engine:
        try:
            deadline_s = time.monotonic() + WAIT_S
            while starting_pid(Endpoint.parse(address)) != engine.pid:
                assert time.monotonic() < deadline_s, "the engine does not hold its address"
                time.sleep(0.02)
            yield engine
        finally:
            engine.kill()


@contextmanager
def _command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "stepscope.tui.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEPSCOPE_CONFIG": "none"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def _commands(address: str, folder: Path) -> dict[str, list[str]]:
    return {
        "snapshot": ["snapshot", address, "--json"],
        "set": ["set", address, "watermark=0.2"],
        "audit": ["snapshot", "--audit", address],
        "record": ["record", address, "-o", str(folder / "a.mcap"), "--seconds", "0.5"],
        "load": ["load", address, "--num-requests", "2", "--rate", "100"],
    }


def test_every_command_says_that_it_waits_for_a_starting_engine(tmp_path: Path) -> None:
    address, go = f"ipc://{tmp_path}/e1", tmp_path / "go"
    with _starting_engine(address, go) as engine:
        waiting = f"e1 (pid {engine.pid}) is still starting; waiting for it; Ctrl-C stops waiting\n"
        with ExitStack() as stack:
            started = {
                name: stack.enter_context(_command(*arguments))
                for name, arguments in _commands(address, tmp_path).items()
            }
            said = {name: _first_line(process) for name, process in started.items()}
            go.touch()
            ended = {name: process.communicate(timeout=WAIT_S) for name, process in started.items()}
    assert said == dict.fromkeys(started, waiting)
    # The simulated engine has no tokenizer: it takes no text.
    codes = {name: process.returncode for name, process in started.items()}
    assert codes == dict.fromkeys(started, 0) | {"load": 1}, ended
    engine_id = json.loads(ended["snapshot"][0])["info"]["engine_id"]
    assert "watermark: 0.0 -> 0.2" in ended["set"][0]
    assert "2 sent" in ended["load"][0]
    with Recording(tmp_path / "a.mcap") as recording:
        assert recording.info.engine_id == engine_id


@pytest.mark.parametrize("name", ["snapshot", "record"])
def test_ctrl_c_ends_the_wait_for_a_starting_engine_at_once(tmp_path: Path, name: str) -> None:
    address = f"ipc://{tmp_path}/e1"
    with (
        _starting_engine(address, tmp_path / "never"),
        _command(*_commands(address, tmp_path)[name]) as process,
    ):
        assert "still starting" in _first_line(process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stdout, stderr) == (130, "", "")
    assert not list(tmp_path.glob("*.mcap*"))


def test_an_engine_that_dies_while_starting_ends_the_wait_with_an_error(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e1"
    with (
        _starting_engine(address, tmp_path / "never") as engine,
        _command("set", address, "watermark=0.2") as process,
    ):
        assert "still starting" in _first_line(process)
        engine.kill()
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    said = f"e1 (pid {engine.pid}) ended while it was starting: its terminal or log says why"
    assert stderr.startswith(f"stepscope: error: {said}")


def test_a_command_waits_for_a_starting_engine_on_tcp_too(tmp_path: Path) -> None:
    address, go = f"tcp://127.0.0.1:{free_port()}", tmp_path / "go"
    with _starting_engine(address, go), _command("snapshot", address) as process:
        assert "still starting" in _first_line(process)
        go.touch()
        stdout, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "state      idle" in stdout
