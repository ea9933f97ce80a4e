"""`top`, `record` and `watch` wait for an engine that is not there yet, and say so."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.adapters.metrics.fetch import MetricsAddress
from stepscope.engine.client.client import EngineSilent, KeyRefused, NoEngine
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.recordings.file.reader import Recording
from stepscope.tui.cli.shared import connect as connecting
from stepscope.tui.cli.shared.connect import NotThere, wait_for_any
from stepscope.tui.settings.cli_errors import CommandFailed
from tests.commands.test_cli_starting import ENGINE, WAIT_S, _command, _first_line
from tests.screens.test_terminal import CTRL_C, STEPSCOPE
from tests.support.engines.metrics_server import metrics_server
from tests.support.ports import free_port
from tests.support.screens.terminal import Terminal

METRICS = Path(__file__).parents[1] / "adapters" / "metrics_texts"


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, runtime_folder: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setenv("STEPSCOPE_CONFIG", "none")


@contextmanager
def engine(address: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, str(ENGINE), address]) as process:
        try:
            yield
        finally:
            process.kill()


def address_of(kind: str, folder: Path) -> str:
    tcp = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else ""
    return {"name": "e1", "path": f"{folder}/p1", "tcp": tcp}[kind]


@pytest.mark.parametrize("kind", ["name", "path", "tcp"])
def test_record_waits_for_its_engine_and_records_it_from_its_start(
    tmp_path: Path, runtime_folder: Path, kind: str
) -> None:
    address = address_of(kind, runtime_folder)
    file = tmp_path / "a.mcap"
    arguments = ["record", address, "-o", str(file), "--seconds", "0.5"]
    with _command(*arguments) as process, ExitStack() as stack:
        said = _first_line(process)
        assert said.startswith(f"waiting for {Endpoint.parse(address).name} since ")
        assert "(Ctrl-C ends): no engine " in said
        assert not file.exists()
        stack.enter_context(engine(address))
        _, stderr = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, stderr
    with Recording(file) as recording:
        assert recording.info.name


def test_record_waits_for_a_metrics_server_too(tmp_path: Path) -> None:
    port = free_port()
    url, file = f"http://127.0.0.1:{port}", tmp_path / "a.mcap"
    with _command("record", url, "-o", str(file), "--seconds", "0.5") as process:
        assert f"{url}/metrics does not answer: Connection refused" in _first_line(process)
        text = (METRICS / "vllm-0.32.txt").read_bytes()
        with metrics_server(lambda: text, port=port):
            _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, stderr


def test_a_misspelt_name_is_waited_for_with_the_names_that_are_there(tmp_path: Path) -> None:
    with (
        EndpointLock(Endpoint.parse("vllm-0"), name="vllm-0"),
        _command("record", "vlm-0", "-o", f"{tmp_path}/a.mcap") as process,
    ):
        assert "running here: vllm-0" in _first_line(process)
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
    with engine("e1"):
        screen.wait_for("LIVE")
        screen.send("q")
        screen.wait_for("ended 0")
        screen.wait_for(r" icanon ")
        screen.wait_for(r" echo ")


def test_a_wait_of_top_can_be_ended(terminal: Callable[..., Terminal]) -> None:
    command = " ".join(STEPSCOPE)
    screen = terminal("bash", "-c", f"{command} top e1; echo ended $?; stty -a", columns=100)
    screen.wait_for("waiting for e1 since ")
    screen.send(CTRL_C)
    screen.wait_for("ended 130")
    screen.wait_for(r" icanon ")
    assert "Traceback" not in screen.text()


def test_top_does_not_wait_if_told_so(terminal: Callable[..., Terminal]) -> None:
    screen = terminal(*STEPSCOPE, "top", "e1", "e2", "--no-wait")
    screen.wait_for("stepscope: error: none of 2 engines answers; e1: no engine at ")
    assert screen.wait_for_exit() == 1


# What is waited for


class _Looks:
    """In place of `check_any`: raises these errors, one a look, and then nothing."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.found: list[Any] = []

    def __call__(self, found: Any) -> None:
        self.found.append(found)
        if self._errors:
            raise self._errors.pop(0)


def test_every_look_asks_anew_which_addresses_a_name_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data-parallel engine comes as ranks."""
    looks = _Looks(EngineSilent("not yet"), NotThere("nor now"), NotThere("nor now"))
    monkeypatch.setattr(connecting, "check_any", looks)
    monkeypatch.setattr(connecting, "_LOOK_S", 0.0)
    one, ranks = [Endpoint("ipc:///v0")], [Endpoint("ipc:///v0.dp0"), Endpoint("ipc:///v0.dp1")]
    names = iter([one, one, one, ranks])
    assert wait_for_any(lambda: next(names), waits=True) == ranks
    assert looks.found == [one, one, one, ranks]
    said = [line for line in capsys.readouterr().err.splitlines() if "since" in line]
    assert [line.rpartition(": ")[2] for line in said] == ["not yet", "nor now"]


@pytest.mark.parametrize(
    "error",
    [
        KeyRefused("it asks for a key"),
        NoEngine(Endpoint("tcp://h:1"), "a web server"),
        CommandFailed("exports no metric"),
    ],
)
def test_what_waiting_cannot_mend_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(connecting, "check_any", _Looks(error))
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
