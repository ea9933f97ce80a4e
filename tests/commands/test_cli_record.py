"""`stepscope record` and `top` on a running engine, and what `replay` says of files."""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Shutdown, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing.writer import RecordingWriter
from tests.support.waiting import wait_for

WAIT_S = 60.0


@pytest.fixture
def busy_engine(live_engine: Any) -> Iterator[Any]:
    """The engine, with running requests for as long as the test lasts."""
    with ControlClient(live_engine.endpoint) as client:
        for first in range(4):
            sampling = SamplingParams(max_tokens=900, ignore_eos=True)
            client.send(Submit(prompt_token_ids=[first] * 20, sampling=sampling))
        yield live_engine


@pytest.fixture
def record(
    busy_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> Callable[..., tuple[Path, Any]]:
    """Runs `stepscope record`, with something that happens once its file is there."""

    def run(*options: str, meanwhile: Callable[[], object]) -> tuple[Path, Any]:
        path = tmp_path / "session.mcap"

        def happen() -> None:
            wait_for(path.with_name(f"{path.name}.part").exists, "it records", WAIT_S)
            time.sleep(0.3)
            meanwhile()

        thread = threading.Thread(target=happen)
        thread.start()
        done = stepscope("record", busy_engine.endpoint.control, "-o", str(path), *options)
        thread.join()
        with Recording(path) as recording:
            assert recording.last_step is not None
            assert not recording.truncated
        return path, done

    return run


def test_record_writes_every_step_for_the_given_seconds(
    busy_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "session.mcap"
    done = stepscope("record", busy_engine.endpoint.control, "-o", str(path), "--seconds", "1")
    assert done.exit_code == 0, done.stderr
    assert f"{path}: " in done.stdout
    assert "0 messages lost" in done.stdout
    assert "recording engine" in done.stderr
    with Recording(path) as recording:
        assert recording.info.engine_id == busy_engine.core.info.engine_id
        assert recording.last_step > recording.first_step
        assert not recording.truncated


def test_an_engine_that_publishes_nothing_is_reported_at_the_start(
    live_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    address = live_engine.endpoint.control
    live_engine.becomes(control_endpoint=address)
    path = str(tmp_path / "a.mcap")
    done = stepscope("record", address, "-o", path, "--seconds", "0.5")
    said = "publishes nothing (--no-telemetry): no step of it will be in the recording"
    assert said in done.stderr
    explained = stepscope("explain", path)
    assert "holds no step, so nothing is known about late tokens" in explained.stderr
    picture = ("-o", str(tmp_path / "a.svg"))
    for name, *rest in (
        *(("explain",), ("stats",), ("tune",), ("what-if", "max_num_seqs=8"), ("simulate",)),
        *(("compare", path), ("screenshot", *picture), ("plot", *picture)),
    ):
        assert stepscope(name, path, *rest).exit_code == 3, name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("end", [(), ("--seconds", "600")], ids=["without an end", "too early"])
def test_a_signal_finishes_a_recording_and_is_an_error_only_if_its_end_was_set(
    record: Callable[..., tuple[Path, Any]], number: signal.Signals, end: tuple[str, ...]
) -> None:
    path, done = record(*end, meanwhile=lambda: signal.raise_signal(number))
    assert done.exit_code == (130 if end else 0), done.stderr
    said = rf"^stepscope: error: interrupted after \d+ of 600 s; {path} holds what came before$"
    assert bool(re.search(said, done.stderr, re.MULTILINE)) == bool(end)


def test_the_unfinished_file_of_a_killed_recorder_is_not_overwritten(
    busy_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    """Starting the same command again must keep the unfinished file: it is the only copy."""
    path = tmp_path / "session.mcap"
    left = path.with_name(path.name + ".part")
    left.write_bytes(b"an hour of steps")
    done = stepscope("record", busy_engine.endpoint.control, "-o", str(path), "--seconds", "60")
    assert done.exit_code == 1
    assert f"{left} is there" in done.stderr
    assert "stepscope verify --repair" in done.stderr
    assert left.read_bytes() == b"an hour of steps"
    assert not path.exists()
    left.unlink()
    writer = RecordingWriter(path)
    done = stepscope("record", busy_engine.endpoint.control, "-o", str(path), "--seconds", "60")
    assert "another recorder is at work" in done.stderr
    writer.close()
    assert writer.error is None


@pytest.mark.parametrize("restarts", [False, True])
def test_record_ends_when_its_engine_ends_and_with_an_error_if_it_restarts(
    busy_engine: Any, record: Callable[..., tuple[Path, Any]], restarts: bool
) -> None:
    with ControlClient(busy_engine.endpoint) as client:
        end, another = partial(client.ask, Shutdown()), partial(busy_engine.becomes, engine_id="b")
        until = ["--seconds", "60"] if restarts else []
        _, done = record(*until, meanwhile=another if restarts else end)
    assert done.exit_code == restarts, done.stderr
    said = "the engine restarted: the recording ends at step"
    assert (said in done.stderr) == restarts


def test_record_replaces_no_file(
    live_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("precious")
    done = stepscope("record", live_engine.endpoint.control, "-o", f"{tmp_path}/precious")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert f"{tmp_path}/precious is there already" in done.stderr
    assert (tmp_path / "precious").read_text() == "precious"


def test_replay_checks_its_step_option_and_needs_a_terminal(
    busy_engine: Any, stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "session.mcap"
    stepscope("record", busy_engine.endpoint.control, "-o", str(path), "--seconds", "0.5")
    for options, said in (
        (["--at", "999999"], "--at: session.mcap holds steps"),
        (["--speed", "1000"], "invalid value for '--speed': Input should be less than or equal to"),
        ([], "the dashboard needs a terminal, and standard input is not one"),
        ([], "'stepscope explain'"),  # of use only to someone who has a recording
    ):
        done = stepscope("replay", str(path), *options)
        assert done.exit_code == 2
        assert said in done.stderr


def test_the_dashboard_runs_with_stderr_redirected_and_leaves_the_engine_running(
    busy_engine: Any, terminal: Callable[..., Any], tmp_path: Path
) -> None:
    screen = terminal(
        *("sh", "-c", 'exec "$@" 2>errors', "sh"),
        *(sys.executable, "-m", "stepscope.tui.cli", "top", busy_engine.endpoint.control),
        cwd=str(tmp_path),
        XDG_CONFIG_HOME=str(tmp_path),
    )
    screen.wait_for("LIVE", WAIT_S)
    screen.send("q")
    assert screen.wait_for_exit(WAIT_S) == 0
    assert (tmp_path / "errors").read_bytes() == b""
    with ControlClient(busy_engine.endpoint) as client:
        assert client.info().engine_id == busy_engine.core.info.engine_id
