"""Which addresses an engine may bind, and how a live engine differs from a dead one's files."""

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from stepscope.engine.adapters.attached.description import rank_endpoint
from stepscope.engine.client.client import (
    ControlClient,
    EngineGone,
    EngineStarting,
    EngineUnreachable,
)
from stepscope.engine.protocol.knobs import ConfigError, WrongValue
from stepscope.engine.transport.endpoints import (
    Endpoint,
    EndpointLock,
    check_name,
    find_local,
    free_name,
    runtime_dir,
)
from stepscope.engine.transport.local_engines import called, starting_pid
from stepscope.recordings.history.history import History
from stepscope.tui.cli.shared.connect import connect, hello
from stepscope.tui.session.live_source import receive


@pytest.fixture(autouse=True)
def private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_the_runtime_dir_is_accessible_to_its_user_only() -> None:
    path = runtime_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    assert stat.S_IMODE(runtime_dir().stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("text", "control", "telemetry"),
    [
        ("tcp://127.0.0.1:5000", "tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"),
        ("ipc:///tmp/e", "ipc:///tmp/e", "ipc:///tmp/e.telemetry"),
        ("/tmp/e", "ipc:///tmp/e", "ipc:///tmp/e.telemetry"),
    ],
)
def test_an_endpoint_names_both_sockets(text: str, control: str, telemetry: str) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.control, endpoint.telemetry) == (control, telemetry)


def test_without_a_folder_for_sockets_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stepscope").write_text("in the way")
    monkeypatch.setattr("platformdirs.user_runtime_path", tmp_path.joinpath)
    with pytest.raises(ConfigError, match=r"File exists.*: set XDG_RUNTIME_DIR to a folder"):
        runtime_dir()


@pytest.mark.parametrize(
    "text",
    [
        *("", "ipc://", "tcp://127.0.0.1", "tcp://:x", "udp://h:1", "/" + "x" * 120),
        *("tcp://a b:5", "tcp://a/b:5", "tcp://é:5", "tcp://[::1:5", "tcp://h:５", "tcp://:5"),
        *("tcp://h", "tcp://h:0", "tcp://h:65535", "tcp://h:x", "/tmp/\x07/e1", "http://h:5"),
    ],
)
def test_text_that_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Endpoint.parse(text)
    assert error.value.code == "bad_endpoint"


def test_a_second_engine_on_an_endpoint_is_refused_with_the_pid_of_the_first() -> None:
    endpoint = Endpoint.parse("engine-0")
    with EndpointLock(endpoint), pytest.raises(ConfigError) as error, EndpointLock(endpoint):
        pass
    assert error.value.code == "endpoint_in_use"
    assert f"pid {os.getpid()}" in str(error.value)


def test_live_local_engines_are_found_and_a_new_engine_gets_an_unused_name() -> None:
    assert find_local() == []
    assert free_name() == "engine-0"
    first, second = Endpoint.parse("engine-0"), Endpoint.parse("tcp://127.0.0.1:5")
    with EndpointLock(first), EndpointLock(second):
        assert [e.name for e in find_local()] == ["engine-0", "127.0.0.1:5"]
        assert free_name() == "engine-1"
    assert find_local() == []
    assert list(runtime_dir().iterdir()) == []


def test_a_file_that_is_no_socket_is_refused_as_an_endpoint_and_kept(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    lock = EndpointLock(Endpoint.parse(str(notes)))
    with pytest.raises(ConfigError, match="is not a socket"), lock:
        pass
    assert notes.read_text() == "precious"
    assert list(tmp_path.glob("*.lock")) == []


@pytest.mark.parametrize("name", ["e1", "vllm-0.dp3", "Night_2", "_x", "7", "x" * 50])
@pytest.mark.parametrize("form", ["{}", "ipc://{}", "/tmp/{}", "ipc:///tmp/{}", " {}\n"])
def test_a_name_of_letters_digits_and_three_signs_names_an_engine(
    monkeypatch: pytest.MonkeyPatch, runtime_folder: Path, name: str, form: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    check_name(name)
    assert Endpoint.parse(form.format(name)).name == name


@pytest.mark.parametrize(
    "name", ["a b", "héllo", "日本", "a:b", "a,b", "$x", "~e", "-x", ".x", "e\t1", "e\0", "e.lock"]
)
@pytest.mark.parametrize("form", ["{}", "ipc://{}", "/tmp/{}", "ipc:///tmp/{}"])
def test_every_way_to_name_an_engine_follows_the_one_rule(
    monkeypatch: pytest.MonkeyPatch, runtime_folder: Path, name: str, form: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    for parse in (check_name, lambda name: Endpoint.parse(form.format(name))):
        with pytest.raises(WrongValue, match="cannot name an engine: use letters") as error:
            parse(name)
        assert error.value.code == "bad_name"


@pytest.mark.parametrize("name", ["../x", "a/b", "x" * 65])
def test_a_name_that_leads_out_of_the_runtime_dir_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_name(name)
    assert error.value.code == "bad_name"


def test_a_name_that_makes_a_socket_path_too_long_says_by_how_much(
    monkeypatch: pytest.MonkeyPatch, runtime_folder: Path
) -> None:
    folder = runtime_folder / ("x" * 40)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert runtime_dir() == folder / "stepscope"
    longest = "e" * (103 - len(".telemetry") - len(str(runtime_dir())) - 1)
    assert Endpoint.parse(longest).name == longest
    said = "shorten the name or the path by 1 bytes, or set XDG_RUNTIME_DIR"
    with pytest.raises(ConfigError, match=said):
        Endpoint.parse(longest + "e")


@pytest.mark.parametrize(
    "text", ["tcp://*:5555", "tcp://[::1]:5", "tcp://gpu_3.lan:5", "tcp://1.2.3.4:5"]
)
def test_a_client_can_connect_to_every_tcp_address_that_is_accepted(text: str) -> None:
    ControlClient(text).close()


@pytest.mark.parametrize(
    ("text", "control"),
    [(" /tmp/v0 ", "ipc:///tmp/v0.dp2"), ("tcp://127.0.0.1:5000", "tcp://127.0.0.1:5004")],
)
def test_a_rank_has_its_own_address(text: str, control: str) -> None:
    assert rank_endpoint(text, 2, 4).control == control
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        rank_endpoint("tcp://127.0.0.1:x", 1, 2)


def test_an_engine_that_locks_its_address_but_does_not_listen_yet_counts_as_starting(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint.parse(f"{tmp_path}/x1")
    with pytest.raises(EngineUnreachable, match="there is no such socket"):
        ControlClient(endpoint).info()
    with EndpointLock(endpoint, name="e1"), ControlClient(endpoint) as client:
        assert (called(endpoint), starting_pid(endpoint)) == ("e1", os.getpid())
        with pytest.raises(EngineStarting, match=rf"^e1 \(pid {os.getpid()}\) is still starting$"):
            client.info()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(endpoint.path))
            assert starting_pid(endpoint) is None
    assert (called(endpoint), starting_pid(endpoint)) == ("x1", None)


def test_an_engine_on_tcp_keeps_its_name_and_is_starting_until_its_port_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint.parse(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        with EndpointLock(endpoint, name="e3"):
            assert (called(endpoint), starting_pid(endpoint)) == ("e3", None)
            listening.close()
            assert starting_pid(endpoint) == os.getpid()
    assert (called(endpoint), starting_pid(endpoint)) == (endpoint.name, None)


def test_connecting_where_no_engine_runs_lists_the_local_engines_and_their_names() -> None:
    with pytest.raises(EngineUnreachable, match=r"such socket; none runs here, 'stepscope serve'"):
        connect(Endpoint.parse("nobody"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        tcp = Endpoint.parse(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        with EndpointLock(tcp, name="e3"), EndpointLock(Endpoint.parse("e5"), name="e5"):
            with pytest.raises(EngineUnreachable) as error:
                connect(Endpoint.parse("nobody"))
            assert str(error.value).endswith(f"; running here: e5; {tcp.control} (called e3)")
            assert receive(tcp, History()).name == "e3"


def test_waiting_for_a_starting_engine_is_reported_and_ends_if_the_engine_dies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = Endpoint.parse(f"{tmp_path}/x1")
    lock = EndpointLock(endpoint, name="e1")
    lock.__enter__()
    with pytest.raises(EngineStarting):
        hello(endpoint)
    gone = threading.Timer(0.5, lock.__exit__, (None, None, None))
    gone.start()
    with pytest.raises(EngineGone, match=r"^e1 \(pid \d+\) ended while it was starting: "):
        connect(endpoint)
    gone.join()
    said = capsys.readouterr().err
    starting = f"e1 (pid {os.getpid()}) is still starting"
    assert said == f"{starting}; waiting for it; Ctrl-C stops waiting\n"
