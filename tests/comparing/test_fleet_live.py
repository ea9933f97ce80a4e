"""`stepscope top A B` in a terminal over real processes: one dies, another takes its place."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.dashboards import top as top_command
from stepscope.tui.cli.shared.connect import check_any
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.views.frame.fleet_view import state_text
from tests.support.engines.engine_process import EngineProcess
from tests.support.waiting import wait_for

Call = Callable[..., Any]


@pytest.fixture
def engines(runtime_folder: Path) -> Iterator[Callable[[str], EngineProcess]]:
    """Starts simulated engines by name, which end with the test."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(EngineProcess(f"{runtime_folder}/{name}"))


def test_an_engine_that_dies_and_its_replacement_are_reported(
    terminal: Call, engines: Callable[[str], EngineProcess], runtime_folder: Path
) -> None:
    _, b = both = engines("engine-a"), engines("engine-b")
    for each in both:
        each.wait()
    addresses = [f"{runtime_folder}/engine-{name}" for name in "bac"]
    screen = terminal(
        sys.executable, "-m", "stepscope.tui.cli", "top", *addresses, STEPSCOPE_CONFIG="none"
    )
    screen.wait_for("2/3 up  1 DOWN")
    # The address is as long as the folder's name is, and may break the line anywhere.
    screen.wait_for(r"(?s)engine-c DOWN .*\sthere\s+is\s+no\s+such\s+socket")
    b.work()
    screen.wait_for(r"▲ engine-b since [\d:]+ \(\d+s\)  100% of all waiting requests")
    screen.wait_for("▼ engine-a since .* has room: 0 of 64 seats")
    screen.send("\r")
    screen.wait_for("ipc://engine-b .*step [1-9]")
    screen.wait_for("requests × steps")
    screen.send("8")
    screen.wait_for("▶engine-b")
    b.kill()
    screen.wait_for(r"1/3 up  2 DOWN", timeout_s=8)
    screen.wait_for(r"engine-b is gone: killed or crashed")
    b.start()
    screen.wait_for(r"engine-b restarted.*: a new engine", timeout_s=20)
    screen.wait_for(r"▶engine-b +LIVE new")
    screen.wait_for("2/3 up  1 DOWN")
    screen.send("q")
    assert screen.wait_for_exit() == 0


def test_a_killed_engine_is_down_before_the_silence(
    engines: Callable[[str], EngineProcess],
) -> None:
    engine = engines("engine")
    engine.wait()
    source = Subscriber(engine.endpoint, stale_s=3600.0)
    source.start()
    try:
        wait_for(lambda: source.status == "live")
        engine.kill()
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


def test_leaving_dead_engines_stops_every_thread(runtime_folder: Path) -> None:
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
