"""A recording in many files: no step is lost in between, each opens alone, old ones are deleted."""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.commands import Shutdown, Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import StepRecord, Telemetry
from stepscope.recordings.check.verify import verify
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing import recording_file
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.file.writing.rotation import FileSeries, SeriesLimits
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.state.session import SessionState
from stepscope.tui.cli.__main__ import main
from stepscope.tui.cli.recordings import record
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.being_written import has_steps
from tests.support.sessions.later import Later
from tests.support.waiting import wait_for

MESSAGES = Later(lambda: simulate(seed=9, num_steps=2000))


def send(writer: RecordingWriter, messages: list[tuple[int, Telemetry]]) -> None:
    for sequence, message in messages:
        writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))


def write(
    series: FileSeries, messages: list[tuple[int, Telemetry]], monkeypatch: pytest.MonkeyPatch
) -> RecordingWriter:
    """Write as if a flush were due after every message."""
    monkeypatch.setattr("stepscope.recordings.file.writing.writer.FLUSH_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    writer = RecordingWriter(series)
    writer.start()
    send(writer, messages)
    writer.close()
    assert (writer.state, writer.error) == ("finished", None)
    return writer


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_no_step_is_lost_between_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = FileSeries(tmp_path / "week.mcap", SeriesLimits(num_bytes=40_000))
    writer = write(series, MESSAGES, monkeypatch)
    written = files(tmp_path)
    assert len(written) == writer.num_files > 3
    state = SessionState()
    expected = {}
    for _, message in MESSAGES:
        state.apply(message)
        if isinstance(message, StepRecord):
            expected[message.step] = (state.num_running, state.kv)
    next_step = 0
    for path in written:  # names sort in the order of recording
        assert verify(path, lambda share: None).is_good
        with Recording(path) as recording:
            assert recording.first_step == next_step
            frames = [frame for frame, _ in recording.frames()]
            if next_step:
                assert [frame.topic for frame in frames[:2]] == [b"info", b"keyframe"]
            replayed = SessionState()
            for frame in frames:
                message = wire.decode(frame.payload)
                replayed.apply(message)
                if isinstance(message, StepRecord):
                    assert message.step == next_step
                    assert (replayed.num_running, replayed.kv) == expected[next_step]
                    next_step += 1
            assert path.stat().st_size < 40_000 + 30_000
    assert next_step == 2000


def test_another_engine_gets_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = FileSeries(tmp_path / "fleet.mcap", SeriesLimits(num_bytes=10**9))
    writer = write(series, MESSAGES[:300] + simulate(seed=10, num_steps=100), monkeypatch)
    assert writer.num_files == 2
    engines = []
    for path in files(tmp_path):
        with Recording(path) as recording:
            engines.append(recording.info.engine_id)
        assert verify(path, lambda share: None).is_good
    assert engines == ["simulated-9", "simulated-10"]


def test_only_old_files_of_ours_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series = FileSeries(tmp_path / "week.mcap", SeriesLimits(num_bytes=40_000))
    write(series, MESSAGES, monkeypatch)
    ours = files(tmp_path)
    old_s = time.time() - 3 * 3600
    name = "week-20200101T000000Z-000.mcap"
    others = {
        tmp_path / name: b"a file of another program under a name like ours",
        tmp_path / "weekend-20200101T000000Z-000.mcap": ours[0].read_bytes(),
        tmp_path / "week.mcap": ours[0].read_bytes(),
        tmp_path / "notes.txt": b"notes",
    }
    for path, content in others.items():
        path.write_bytes(content)
    link = tmp_path / "week-20200101T000001Z-000.mcap"
    link.symlink_to(ours[-1])
    for path in [*others, *ours[:2]]:
        os.utime(path, (old_s, old_s))
    later = FileSeries(tmp_path / "week.mcap", SeriesLimits(age_s=60), SeriesLimits(age_s=7200))
    current = later.open_next()
    later.delete_old(current)
    assert files(tmp_path) == sorted([*others, link, *ours[2:], current.part_path])
    # By size: the oldest go first, until the rest fits.
    total = sum(path.stat().st_size for path in ours[3:])
    kept = SeriesLimits(num_bytes=total)
    FileSeries(tmp_path / "week.mcap", SeriesLimits(age_s=60), kept).delete_old(current)
    assert [path for path in ours if path.exists()] == ours[3:]
    current.abandon()


def test_silence_makes_and_deletes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording from before an engine's death is still there on Monday."""
    monkeypatch.setattr("stepscope.recordings.file.writing.writer.CLEAN_S", 0.0)
    write(FileSeries(tmp_path / "w.mcap", SeriesLimits(num_bytes=40_000)), MESSAGES, monkeypatch)
    old = files(tmp_path)
    assert len(old) > 3
    for path in old:
        os.utime(path, (0, 0))
    flushed = threading.Semaphore(0)
    flush = RecordingFile.flush

    def counted(file: RecordingFile) -> None:
        flush(file)
        flushed.release()

    monkeypatch.setattr(RecordingFile, "flush", counted)
    series = FileSeries(tmp_path / "w.mcap", SeriesLimits(age_s=0.001), SeriesLimits(age_s=3600))
    writer = RecordingWriter(series)
    writer.start()
    for _ in range(20):
        assert flushed.acquire(timeout=60)
    assert writer.num_files == 1
    assert [path for path in old if path.exists()] == old
    send(writer, MESSAGES[:20])

    def is_left(path: Path) -> bool:
        """By its date: a new file may have the name of a deleted one."""
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime == 0
        return False

    wait_for(lambda: not any(map(is_left, old)), "the old files to go")
    wait_for(lambda: writer.num_files > 1, "the next file")
    writer.close()


def test_a_new_file_of_a_series_never_replaces_an_existing_one(tmp_path: Path) -> None:
    series = FileSeries(tmp_path / "x.mcap", SeriesLimits(age_s=1))
    opened: list[RecordingFile] = [series.open_next() for _ in range(3)]
    assert len({file.path for file in opened}) == 3
    assert sorted(file.path for file in opened) == [file.path for file in opened]
    for file in opened:
        file.abandon()
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="cannot write"):
        FileSeries(tmp_path / "file" / "x.mcap", SeriesLimits(age_s=1)).open_next()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1GB", SeriesLimits(10**9, None)),
        ("48h", SeriesLimits(None, 172_800.0)),
        ("1.5GiB, 30m", SeriesLimits(round(1.5 * 2**30), 1800.0)),
        ("7d,100GB", SeriesLimits(10**11, 604_800.0)),
    ],
)
def test_series_limits_accept_sizes_and_times(text: str, expected: SeriesLimits) -> None:
    assert SeriesLimits.parse(text) == expected


@pytest.mark.parametrize("text", ["", "1", "GB", "1GB,2GB", "-1h", "1 parsec", "0h", "1GB;1h"])
def test_meaningless_series_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        SeriesLimits.parse(text)


def test_record_rotates_files_until_a_signal(
    live_engine: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    endpoint = live_engine.endpoint  # type: ignore[attr-defined]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "s.mcap"

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["stepscope", "record", endpoint.control, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    with ControlClient(endpoint) as client:
        sampling = SamplingParams(max_tokens=900, ignore_eos=True)
        client.send(Submit(prompt_token_ids=[1] * 20, sampling=sampling))
        assert run("-o", str(output), "--rotate", "1s", "--keep", "1h", "--seconds", "3.5") == 0
    said = capfd.readouterr().out
    written = files(tmp_path / "out")
    assert len(written) >= 2
    assert said.startswith(f"{len(written)} files, ")
    last = None
    for path in written:
        with Recording(path) as recording:
            assert not recording.truncated
            if recording.first_step is not None:
                assert last is None or recording.first_step == last + 1
                last = recording.last_step
    for wrong in (["--rotate", "1kB"], ["--rotate", "soon"], ["--keep", "1h"]):
        assert run("-o", str(output), *wrong) == 2
        assert capfd.readouterr().err.count("\n") == 1


def test_a_corrected_clock_deletes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SeriesLimits(num_bytes=40_000), SeriesLimits(age_s=7200)
    series = FileSeries(tmp_path / "week.mcap", *limits)
    write(series, MESSAGES, monkeypatch)
    ours = files(tmp_path)
    assert len(ours) > 2
    current = series.open_next()
    now_s, running_s = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: now_s + 20 * 365 * 86_400)
    series.delete_old(current)
    assert ours == [path for path in files(tmp_path) if path != current.part_path]
    monkeypatch.setattr(time, "monotonic", lambda: running_s + 7201)
    series.delete_old(current)
    assert files(tmp_path) == [current.part_path]
    current.abandon()


def test_anothers_open_file_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recorders were given one name: neither deletes the file that the other writes."""
    path = tmp_path / "week.mcap"
    series = FileSeries(path, SeriesLimits(age_s=3600))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    writer = RecordingWriter(series)
    monkeypatch.setattr("stepscope.recordings.file.writing.writer.FLUSH_S", 0.0)
    writer.start()
    send(writer, MESSAGES[:200])
    wait_for(lambda: has_steps(writer.path), "something is in the file")
    other = FileSeries(path, SeriesLimits(age_s=3600), SeriesLimits(num_bytes=1))
    current = other.open_next()
    other.delete_old(current)
    writer.close()
    assert writer.error is None
    killed = writer.path.rename(f"{writer.path}.part")
    other.delete_old(current)
    assert not killed.exists()  # the unfinished file of a dead recorder may be deleted
    current.abandon()


def test_a_full_disk_gives_a_one_line_error_and_leaves_the_last_file_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stepscope.recordings.file.writing.writer.FLUSH_S", 0.0)
    writer = RecordingWriter(FileSeries(tmp_path / "week.mcap", SeriesLimits(num_bytes=40_000)))

    def no_more(path: Path, mode: str, **_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(recording_file, "open", no_more, raising=False)
    writer.start()
    send(writer, MESSAGES)
    writer.close()
    assert writer.state == "failed"
    assert "No space left on device (steps 0 to " in writer.error
    assert "\n" not in writer.error
    assert not caplog.records
    assert files(tmp_path) == [writer.path]
    with Recording(writer.path) as recording:
        assert not recording.truncated


@pytest.mark.slow
def test_a_series_without_messages_says_so_and_why(
    live_engine: Any, stepscope: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for days; its operator must not believe that it records."""
    monkeypatch.setattr(record, "_GONE_S", 0.5)
    output = tmp_path / "s.mcap"

    def shut_down() -> None:
        wait_for(lambda: any(file.stat().st_size for file in tmp_path.glob("s-*")), "a snapshot")
        with ControlClient(live_engine.endpoint) as client:
            client.ask(Shutdown())

    thread = threading.Thread(target=shut_down)
    thread.start()
    control = live_engine.endpoint.control
    done = stepscope("record", control, "-o", str(output), "--rotate", "1h", "--seconds", "8")
    thread.join()
    assert done.exit_code == 0, done.stderr
    assert "recording engine" in done.stderr
    assert any(line.startswith("waiting for") for line in done.stderr.splitlines())
