"""`stepscope top A B` in a terminal over real processes: one dies, another takes its place."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.dashboards import top as top_command
from stepscope.tui.cli.shared.connect import check_any
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views.frame.fleet_view import state_text
from tests.support.waiting import wait_for

Call = Callable[..., Any]

ENGINE = str(Path(__file__).parents[1] / "support" / "engines" / "simulated_engine.py")


class Engines:
    """Simulated engines in processes of their own."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[ControlClient] = []

    def start(self, address: str) -> None:
        """Start another engine, possibly at the address of an earlier one."""
        self.running[address] = subprocess.Popen([sys.executable, ENGINE, address])

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for address in list(self.running):
            self.kill(address)

    def kill(self, address: str) -> None:
        process = self.running.pop(address)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait(self, address: str) -> None:
        """Wait until the engine answers."""
        wait_for(Path(address).exists)

    def submit(self, address: str, number: int) -> None:
        """Submit requests, more than there are seats or KV blocks for."""
        client = ControlClient(Endpoint.parse(address))
        self._clients.append(client)  # requests end with their client
        for each in range(number):
            sampling = SamplingParams(max_tokens=900, ignore_eos=True)
            told = {"client_id": f"r{each}", "prompt_token_ids": [each] * 90}
            client.send(Submit(sampling=sampling, **told))


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


def test_an_engine_that_dies_and_its_replacement_are_reported(
    terminal: Call, engines: Engines, runtime_folder: Path
) -> None:
    a, b = f"{runtime_folder}/engine-a", f"{runtime_folder}/engine-b"
    for address in (a, b):
        engines.start(address)
    for address in (a, b):
        engines.wait(address)
    screen = terminal(
        *(sys.executable, "-m", "stepscope.tui.cli", "top", b, a, f"{runtime_folder}/engine-c"),
        STEPSCOPE_CONFIG="none",
    )
    screen.wait_for("2/3 up  1 DOWN")
    # The address is as long as the folder's name is, and may break the line anywhere.
    screen.wait_for(r"(?s)engine-c DOWN .*\sthere\s+is\s+no\s+such\s+socket")
    engines.submit(b, 60)
    screen.wait_for(r"▲ engine-b since [\d:]+ \(\d+s\)  100% of all waiting requests")
    screen.wait_for("▼ engine-a since .* has room: 0 of 64 seats")
    screen.send("\r")
    screen.wait_for("ipc://engine-b .*step [1-9]")
    screen.wait_for("requests × steps")
    screen.send("8")
    screen.wait_for("▶engine-b")
    engines.kill(b)
    screen.wait_for(r"1/3 up  2 DOWN", timeout_s=8)
    screen.wait_for(r"engine-b is gone: killed or crashed")
    engines.start(b)
    screen.wait_for(r"engine-b restarted.*: a new engine", timeout_s=20)
    screen.wait_for(r"▶engine-b +LIVE new")
    screen.wait_for("2/3 up  1 DOWN")
    screen.send("q")
    assert screen.wait_for_exit() == 0


def test_a_killed_engine_is_down_before_the_silence(engines: Engines, runtime_folder: Path) -> None:
    address = f"{runtime_folder}/engine"
    engines.start(address)
    engines.wait(address)
    source = Subscriber(address, stale_s=3600.0)
    source.start()
    try:
        wait_for(lambda: source.status == "live")
        engines.kill(address)
        wait_for(lambda: source.status == "down")
    finally:
        source.stop()


@pytest.fixture
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.usefixtures("nothing_configured")
def test_named_engines_win_over_the_environment_and_the_environment_over_the_config_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime_folder: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))

    def shown(*named: str) -> list[str]:
        return [endpoint.name for endpoint in top_command.engines_to_show(named)]

    with pytest.raises(CommandFailed, match="no engine runs on this machine"):
        shown()
    config = tmp_path / "stepscope" / "config.toml"
    config.parent.mkdir()
    config.write_text('[fleet]\nengines = ["x", "tcp://10.0.0.7:5555"]\n')
    assert shown() == ["x", "10.0.0.7:5555"]
    monkeypatch.setenv("STEPSCOPE_FLEET_ENGINES", "y, z")
    assert shown() == ["y", "z"]
    assert shown("a", "b", "a") == ["a", "b"]
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        shown("a", "udp://b")
    config.write_text("[fleet]\nengines = 3\n")
    with pytest.raises(WrongUsage, match=r"\[fleet\] engines = 3: expected a list"):
        shown()


def test_a_fleet_starts_if_at_least_one_engine_answers(runtime_folder: Path) -> None:
    nobody = [Endpoint.parse(f"{runtime_folder}/{name}") for name in ("p", "q")]
    with pytest.raises(CommandFailed, match=r"none of 2 engines answers; p: no engine at .*; q: "):
        check_any(nobody)


def test_leaving_dead_engines_stops_every_thread(engines: Engines, runtime_folder: Path) -> None:
    fleet = Fleet([Subscriber(f"{runtime_folder}/none-{number}") for number in range(12)])
    fleet.start()
    fleet.stop()
    names = {thread.name for thread in threading.enumerate()}
    assert "subscriber" not in names
    assert "end of a source" not in names


def test_an_engine_that_loads_is_starting_and_down_once_it_is_gone(runtime_folder: Path) -> None:
    endpoint = Endpoint.parse(f"{runtime_folder}/loading")
    source = Subscriber(endpoint, retry_s=0.05)
    fleet = Fleet([source])

    def wait(word: str) -> str:
        deadline_s = time.monotonic() + 20
        while not state_text(line := fleet.look().lines[0])[0].startswith(word):
            assert time.monotonic() < deadline_s, f"it is {state_text(line)}"
            time.sleep(0.02)
        assert not line.figures.is_up
        return line.figures.error or ""

    with EndpointLock(endpoint, name="e1"):
        fleet.start()
        assert wait("STARTING") == f"e1 (pid {os.getpid()}) is still starting"
    assert "there is no such socket" in wait("DOWN")
    fleet.stop()
