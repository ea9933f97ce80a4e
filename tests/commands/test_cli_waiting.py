"""Commands wait for an engine that is starting, or not there yet, and say so."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from stepscope.engine.adapters.metrics.fetch import MetricsAddress
from stepscope.engine.client.client import EngineSilent, KeyRefused, NoEngine
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.engine.transport.local_engines import starting_pid
from stepscope.recordings.file.reader import Recording
from stepscope.tui.cli.shared import connect as connecting
from stepscope.tui.cli.shared.connect import NotThere, wait_for_any
from stepscope.tui.settings.cli_errors import CommandFailed
from tests.screens.test_terminal import STEPSCOPE
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.metrics_server import metrics_server
from tests.support.ports import free_port
from tests.support.screens.terminal import Terminal
from tests.support.waiting import wait_for

WAIT_S = 30.0
METRICS = Path(__file__).parents[1] / "adapters" / "metrics_texts"


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, runtime_folder: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setenv("STEPSCOPE_CONFIG", "none")


@contextmanager
def _starting_engine(address: str, go: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that holds its address, and listens once the file `go` exists."""
    with EngineProcess(address, "", str(go)) as engine:
        pid = engine.process.pid
        wait_for(lambda: starting_pid(engine.endpoint) == pid, "it holds its address")
        yield engine.process


@contextmanager
def _command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command, pipe = [sys.executable, "-m", "stepscope.tui.cli", *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


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
            said = {name: process.stderr.readline() for name, process in started.items()}
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
        assert "still starting" in process.stderr.readline()
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
        assert "still starting" in process.stderr.readline()
        engine.kill()
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    said = f"e1 (pid {engine.pid}) ended while it was starting: its terminal or log says why"
    assert stderr.startswith(f"stepscope: error: {said}")


@pytest.mark.parametrize("kind", ["name", "path", "tcp"])
def test_record_waits_for_its_engine_and_records_it_from_its_start(
    tmp_path: Path, runtime_folder: Path, kind: str
) -> None:
    tcp = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else ""
    address = {"name": "e1", "path": f"{runtime_folder}/p1", "tcp": tcp}[kind]
    file = tmp_path / "a.mcap"
    with (
        _command("record", address, "-o", str(file), "--seconds", "0.5") as process,
        ExitStack() as stack,
    ):
        said = process.stderr.readline()
        assert said.startswith(f"waiting for {Endpoint.parse(address).name} since ")
        assert "(Ctrl-C ends): no engine " in said
        assert not file.exists()
        stack.enter_context(EngineProcess(address))
        _, stderr = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, stderr
    with Recording(file) as recording:
        assert recording.info.name


def test_record_waits_for_a_metrics_server_too(tmp_path: Path) -> None:
    port = free_port()
    url, file = f"http://127.0.0.1:{port}", tmp_path / "a.mcap"
    with _command("record", url, "-o", str(file), "--seconds", "0.5") as process:
        assert f"{url}/metrics does not answer: Connection refused" in process.stderr.readline()
        text = (METRICS / "vllm-0.32.txt").read_bytes()
        with metrics_server(lambda: text, port=port):
            _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, stderr


def test_a_misspelt_name_is_waited_for_with_the_names_that_are_there(tmp_path: Path) -> None:
    with (
        EndpointLock(Endpoint.parse("vllm-0"), name="vllm-0"),
        _command("record", "vlm-0", "-o", f"{tmp_path}/a.mcap") as process,
    ):
        assert "running here: vllm-0" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stdout) == (130, "")
    assert not list(tmp_path.glob("*.mcap*"))


def test_top_waits_attaches_and_leaves_the_terminal_as_it_was(
    terminal: Callable[..., Terminal],
) -> None:
    command = " ".join(STEPSCOPE)
    screen = terminal("bash", "-c", f"{command} top e1; echo ended $?; stty -a", columns=100)
    screen.wait_for(r"waiting for e1 since \d\d:\d\d:\d\d \(Ctrl-C ends\): no engine at ")
    with EngineProcess("e1"):
        screen.wait_for("LIVE")
        screen.send("q")
        screen.wait_for("ended 0")
        screen.wait_for(r" icanon ")
        screen.wait_for(r" echo ")


def test_top_does_not_wait_if_told_so(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(*STEPSCOPE, "top", "e1", "e2", "--no-wait")
    screen.wait_for("stepscope: error: none of 2 engines answers; e1: no engine at ")
    assert screen.wait_for_exit() == 1


# What is waited for


def test_every_look_asks_anew_which_addresses_a_name_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data-parallel engine comes as ranks."""
    looks = Mock(side_effect=[EngineSilent("not yet"), *[NotThere("nor now")] * 2, None])
    monkeypatch.setattr(connecting, "check_any", looks)
    monkeypatch.setattr(connecting, "_LOOK_S", 0.0)
    one, ranks = [Endpoint("ipc:///v0")], [Endpoint("ipc:///v0.dp0"), Endpoint("ipc:///v0.dp1")]
    names = iter([one, one, one, ranks])
    assert wait_for_any(lambda: next(names), waits=True) == ranks
    assert looks.call_args_list == [call(each) for each in (one, one, one, ranks)]
    said = [line for line in capsys.readouterr().err.splitlines() if "since" in line]
    assert [line.rpartition(": ")[2] for line in said] == ["not yet", "nor now"]


@pytest.mark.parametrize(
    "error",
    [KeyRefused("a key"), NoEngine(Endpoint("tcp://h:1"), "a web server"), CommandFailed("none")],
)
def test_what_waiting_cannot_mend_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(connecting, "check_any", Mock(side_effect=error))
    with pytest.raises(type(error), match=str(error).partition(" (")[0]):
        wait_for_any(lambda: [Endpoint("ipc:///v0")], waits=True)


@pytest.mark.parametrize(("status", "kind"), [(503, NotThere), (404, CommandFailed)])
def test_a_server_that_cannot_serve_yet_is_waited_for_and_a_wrong_one_is_not(
    status: int, kind: type[Exception]
) -> None:
    with (
        metrics_server(lambda: b"loading", status=status) as url,
        pytest.raises(CommandFailed) as error,
    ):
        connecting.check_metrics(MetricsAddress.parse(url))
    assert type(error.value) is kind
