"""The next engine to start removes the files of killed engines, and no others."""

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.engine.client.client import ControlClient, EngineGone
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock, find_local, runtime_dir
from stepscope.engine.transport.local_engines import sweep

# Has the files of an engine; ends when its standard input does.
_ENGINE = """
import sys, zmq
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
endpoint = Endpoint.parse(sys.argv[1])
with EndpointLock(endpoint):
    context = zmq.Context.instance()
    control, telemetry = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    control.bind(endpoint.control)
    telemetry.bind(endpoint.telemetry)
    print("bound", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    return runtime_dir()


@pytest.fixture
def engine() -> Iterator[Callable[[str], "subprocess.Popen[bytes]"]]:
    """Starts an engine with a name; kills those still running after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"bound\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    process.communicate()
    return process.pid


def test_the_next_engine_of_any_name_removes_the_sockets_of_a_killed_engine(
    folder: Path,
    engine: Callable[[str], "subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid = killed(engine("demo-1"))
    assert names(folder) == ["demo-1", "demo-1.lock", "demo-1.telemetry"]
    assert find_local() == []
    (folder / "demo-1").unlink()
    said = rf"^demo-1 is gone: killed or crashed \(pid {pid}\)$"
    with ControlClient("demo-1") as client, pytest.raises(EngineGone, match=said):
        client.info()
    # The sockets are removed before a model is loaded, which fails here.
    monkeypatch.setitem(sys.modules, "stepscope.engine.execution.loading", None)
    opened = open_engine(EngineConfig(name="other"), Knobs(), progress=lambda what, share: None)
    with pytest.raises(ImportError), opened:
        pass
    assert names(folder) == []


def test_files_of_live_and_starting_engines_and_foreign_files_are_kept(
    folder: Path, tmp_path: Path, engine: Callable[[str], "subprocess.Popen[bytes]"]
) -> None:
    live = engine("live")
    with EndpointLock(Endpoint.parse("starting")):
        make_socket(folder / "without-a-lock")
        make_socket(folder / "of-others")
        (folder / "of-others.lock").write_text("4711")
        make_socket(folder / "elsewhere")
        lock(folder / "elsewhere.lock", "ipc:///run/other/elsewhere")
        (folder / "notes").write_text("precious")
        lock(folder / "notes.lock", f"ipc://{folder}/notes")
        make_socket(tmp_path / "target")
        (folder / "link").symlink_to(tmp_path / "target")
        lock(folder / "link.lock", f"ipc://{folder}/link")
        before = names(folder)
        sweep()
        assert names(folder) == [each for each in before if each not in ("notes.lock", "link.lock")]
        assert sorted(each.name for each in find_local()) == ["live", "starting"]
    assert live.poll() is None
    assert stat.S_ISSOCK((tmp_path / "target").stat().st_mode)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def lock(path: Path, control: str) -> None:
    path.write_text(json.dumps({"pid": 4711, "control": control}))


# Starts and is killed, or ends, again and again; 3: its socket or its lock was taken from it.
_STARTER = """
import os, random, socket, time
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock, same_file

endpoint = Endpoint.parse("contested")
source = random.Random(os.getpid())

def live(is_killed, seconds):
    try:
        with EndpointLock(endpoint) as lock, socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(endpoint.path))
            mine = os.stat(endpoint.path).st_ino
            time.sleep(seconds)
            try:
                is_whole = os.stat(endpoint.path).st_ino == mine
            except FileNotFoundError:
                is_whole = False
            if not is_whole or not same_file(lock._fd, lock.path):
                os._exit(3)
            if is_killed:
                os._exit(0)
    except ConfigError:
        os._exit(9)  # another one was quicker
    os._exit(0)

codes = []
end_s = time.monotonic() + 3.0
while time.monotonic() < end_s:
    is_killed, seconds = source.random() < 0.5, source.random() * 0.004
    pid = os.fork()
    if not pid:
        try:
            live(is_killed, seconds)
        finally:
            os._exit(4)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(*codes)
"""
_SWEEPER = """
import time
from stepscope.engine.transport import local_engines
end_s = time.monotonic() + 3.0
while time.monotonic() < end_s:
    local_engines.sweep()
"""


@pytest.mark.slow
def test_concurrent_starts_and_sweeps_remove_no_file_of_a_live_engine() -> None:
    programs = [_STARTER, _STARTER, _SWEEPER, _SWEEPER]
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for program in programs
    ]
    said = [process.communicate(timeout=30)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    codes = [code for each in said for code in each.split()]
    assert codes.count("0") > 10
    assert set(codes) <= {"0", "9"}
