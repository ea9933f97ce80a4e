"""Reading a recording while its recorder still writes it."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.check.rewrite import rewrite
from stepscope.recordings.check.verify import VerifyReport, verify
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.file.writing.writer import RecordingWriter
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.later import Later
from tests.support.sessions.seek_sessions import record
from tests.support.waiting import wait_for

MESSAGES = Later(lambda: simulate(seed=6, num_steps=3000))

RECORDER = """
import sys, time
from stepscope.engine.protocol import wire
from tests.support.engines.simulated_run import simulate
from stepscope.recordings.file.writing import recording_file, writer
writer.FLUSH_S = 0.01
recording_file.CHUNK_BYTES = 50_000
recorder = writer.RecordingWriter(sys.argv[1])
recorder.start()
for sequence, message in simulate(seed=6, num_steps=4000):
    recorder.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    time.sleep(0.002)
time.sleep(100)
"""


def nothing(share: float) -> None:
    return


def problems(report: VerifyReport) -> list[str]:
    return [problem for check in report.checks for problem in check.problems]


def steps_in(path: Path) -> int:
    try:
        with Recording(path) as recording:
            return (recording.last_step or 0) - (recording.first_step or 0)
    except RecordingError:
        return 0


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """A process that records into `live.mcap`; yields a function that kills it."""
    process = subprocess.Popen([sys.executable, "-c", RECORDER, str(tmp_path / "live.mcap")])

    def kill() -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    wait_for(lambda: steps_in(tmp_path / "live.mcap") > 100, "steps are in it")
    yield kill
    if process.poll() is None:
        kill()


@pytest.mark.slow
def test_verify_finds_no_problem_in_a_file_being_written(
    tmp_path: Path, recorder: Callable[[], None], stepscope: Callable[..., Any]
) -> None:
    path = tmp_path / "live.mcap"
    num_steps = 0
    for _ in range(15):  # wherever the recorder may be in the file
        report = verify(path, nothing)
        assert report.is_being_written
        assert problems(report) == []
        assert report.num_steps >= num_steps
        num_steps = report.num_steps
    assert num_steps > 100
    for name in ("live.mcap", "live.mcap.part"):
        done = stepscope("verify", str(tmp_path / name))
        assert done.exit_code == 0
        assert "it is being written right now: its end is not in it yet" in done.stdout
        assert done.stdout.endswith("all is well so far\n")
    document = json.loads(stepscope("verify", str(path), "--json").stdout)
    assert (document["ok"], document["is_being_written"]) == (True, True)
    with Recording(path) as recording:
        said = (
            f"being written right now; what comes after step {recording.last_step:,} is not written"
        )
        assert said in (recording.message or "")
    recorder()
    done = stepscope("verify", str(path))
    assert done.exit_code == 1
    assert "it was not closed (crash, full disk or cut copy)" in done.stdout


@pytest.mark.slow
def test_repair_refuses_a_file_being_written_and_repairs_it_after_a_crash(
    tmp_path: Path, recorder: Callable[[], None], stepscope: Callable[..., Any]
) -> None:
    part = tmp_path / "live.mcap.part"
    for options in ((), ("--strip-tokens",), ("-o", str(tmp_path / "new.mcap"))):
        done = stepscope("verify", "--repair", str(part), *options)
        assert done.exit_code == 1
        assert "it is being written right now; its recorder makes it whole" in done.stderr
        assert done.stderr.count("\n") == 1
    for make in (rewrite, partial(rewrite, without_tokens=True)):
        with pytest.raises(RecordingError, match="being written right now"):
            make(part, tmp_path / "new.mcap", nothing)
    assert [path.name for path in tmp_path.glob("*.mcap*")] == [part.name]
    recorder()
    assert stepscope("verify", "--repair", str(part)).exit_code == 0
    assert problems(verify(tmp_path / "live.mcap", nothing)) == []


def test_a_half_written_record_is_no_damage_but_damage_before_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.recordings.file.writing.recording_file.CHUNK_BYTES", 25_000)
    content = record(tmp_path / "whole.mcap", MESSAGES[:1000]).read_bytes()
    with Recording(tmp_path / "whole.mcap") as recording:
        places = recording.index.chunks
        assert len(places) > 3
    choose = random.Random(5)
    cuts = [places[2].offset + add for add in (0, 1, 8, 20, 56, 57, 58)]
    cuts += [choose.randrange(places[2].offset, places[-1].end) for _ in range(8)]
    path = tmp_path / "live.mcap.part"
    for cut in cuts:
        path.write_bytes(content[:cut])
        with open(path, "rb") as writing:
            fcntl.flock(writing, fcntl.LOCK_EX)
            assert problems(verify(path, nothing)) == []
            damaged = bytearray(content[:cut])
            damaged[places[1].offset + 1000] ^= 1
            path.write_bytes(damaged)
            report = verify(path, nothing)
            assert report.is_being_written
            assert not report.checksums.is_good


def test_a_file_finished_while_verify_reads_it_is_verified_as_it_was_when_opened(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path)
    writer.start()
    for sequence, message in MESSAGES:
        writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    wait_for(lambda: writer.num_safe_steps > 0, "something is in the file")
    report = verify(path, lambda share: writer.close() if writer.state == "recording" else None)
    assert not path.with_name("a.mcap.part").exists()
    assert report.is_being_written
    assert problems(report) == []
    report = verify(path, nothing)
    assert not report.is_being_written
    assert (problems(report), report.num_steps) == ([], 3000)


def test_a_file_without_messages_yet_is_reported_as_empty(
    tmp_path: Path, stepscope: Callable[..., Any]
) -> None:
    path = tmp_path / "a.mcap"
    file = RecordingFile(path)
    for _ in range(2):
        done = stepscope("verify", str(path))
        assert done.exit_code == 1
        assert "is being written right now, and nothing can be read in it yet" in done.stderr
        file.flush()
    file.abandon()
