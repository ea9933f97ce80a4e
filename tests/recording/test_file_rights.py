"""File permissions: files with prompts and outputs are readable by their owner alone."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import EngineInfo, StepRecord, Telemetry
from stepscope.recordings.check.rewrite import rewrite
from stepscope.recordings.export.export import export
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.file.writing.rotation import FileSeries, SeriesLimits
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.tui.screens.handlers import new_picture
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.seek_sessions import record

Messages = list[tuple[int, Telemetry]]
PLAIN: Messages = simulate(seed=4, num_steps=900)
OWNER, EVERYBODY = 0o600, 0o644


def told(message: Telemetry) -> Telemetry:
    """A session of an engine that publishes prompts and outputs."""
    replace = msgspec.structs.replace
    if isinstance(message, EngineInfo):
        return replace(message, with_tokens=True)
    if isinstance(message, StepRecord) and message.batch:
        return replace(message, token_ids=[7 for _ in message.batch])
    return message


TOLD: Messages = [(number, told(message)) for number, message in PLAIN]


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """By default, new files are readable by everybody."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def nothing(share: float) -> None:
    return


def watched(folder: Path, suffix: str) -> tuple[list[int], Callable[[float], None]]:
    """The permissions of an unfinished file at each progress report, and the callback for them."""
    seen: list[int] = []

    def look(share: float) -> None:
        seen.extend(rights(each) for each in folder.glob(f"*{suffix}"))

    return seen, look


@pytest.mark.parametrize("with_tokens", [True, False])
def test_a_file_is_private_unless_it_holds_no_tokens(tmp_path: Path, with_tokens: bool) -> None:
    expected = OWNER if with_tokens else EVERYBODY
    file = RecordingFile(tmp_path / "a.mcap")
    assert rights(file.part_path) == OWNER  # the file is empty, but whoever has it open may read on
    info = next(message for _, message in PLAIN if isinstance(message, EngineInfo))
    file.begin(msgspec.structs.replace(info, with_tokens=with_tokens), {})
    file.flush()
    assert rights(file.part_path) == expected
    file.close()
    assert rights(tmp_path / "a.mcap") == expected
    assert os.listdir(tmp_path) == ["a.mcap"]


def test_a_recording_with_tokens_that_replaces_a_public_file_is_private(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mcap", PLAIN)
    assert rights(path) == EVERYBODY
    record(path, TOLD)
    assert rights(path) == OWNER


@pytest.mark.parametrize(("messages", "expected"), [(TOLD, OWNER), (PLAIN, EVERYBODY)])
def test_every_file_of_a_series_even_an_unfinished_one_has_the_same_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages, expected: int
) -> None:
    monkeypatch.setattr("stepscope.recordings.file.writing.writer.FLUSH_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    writer = RecordingWriter(FileSeries(tmp_path / "week.mcap", SeriesLimits(num_bytes=20_000)))
    writer.start()
    for sequence, message in messages:
        writer.on_frame(wire.TOPICS[type(message)], sequence, wire.encode(message))
    monkeypatch.setattr(RecordingFile, "close", RecordingFile.abandon)  # as on a full disk
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    assert files[-1].suffix == ".part"
    assert {rights(path) for path in files} == {expected}


@pytest.mark.parametrize("keeps_header", [True, False])
@pytest.mark.parametrize(("messages", "expected"), [(TOLD, OWNER), (PLAIN, EVERYBODY)])
def test_a_repaired_file_has_the_permissions_for_its_content_from_the_start(
    tmp_path: Path, messages: Messages, expected: int, keeps_header: bool
) -> None:
    path = record(tmp_path / "a.mcap", messages)
    content = bytearray(path.read_bytes()[:-2000])
    if not keeps_header:  # the file's own metadata; its keyframes repeat it
        begin = content.index(b"with_tokens")
        content[begin - 40 : begin + 20] = b"\xff" * 60
    path.write_bytes(content)
    path.chmod(EVERYBODY)
    seen, look = watched(tmp_path, ".rewriting.part")
    rewrite(path, tmp_path / "new.mcap", look)
    assert set(seen) == {expected}
    assert rights(tmp_path / "new.mcap") == expected
    with Recording(tmp_path / "new.mcap") as recording:
        assert recording.metadata["with_tokens"] == str(expected == OWNER).lower()


def test_a_file_stripped_of_prompts_has_ordinary_permissions_again(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mcap", TOLD)
    assert rewrite(path, tmp_path / "b.mcap", nothing, without_tokens=True).had_tokens
    assert rights(tmp_path / "b.mcap") == EVERYBODY


@pytest.mark.parametrize("with_tokens", [True, False])
def test_an_export_with_tokens_is_private_from_the_start(tmp_path: Path, with_tokens: bool) -> None:
    expected = OWNER if with_tokens else EVERYBODY
    path = record(tmp_path / "a.mcap", TOLD)
    (tmp_path / "b.jsonl.exporting").touch(EVERYBODY)  # left by an export that was killed
    seen, look = watched(tmp_path, ".exporting")
    output = tmp_path / "b.jsonl"
    with Recording(path) as recording:
        export(recording, output, "jsonl", StepRange(), "steps", look, with_tokens=with_tokens)
    assert set(seen) == {expected}
    assert rights(output) == expected
    assert (b'"token_ids":[7' in output.read_bytes()) is with_tokens


def test_pictures_that_may_show_prompts_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepscope: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rights(new_picture("<svg/>", "engine")) == OWNER  # whatever is on the screen
    for messages, expected in ((PLAIN, EVERYBODY), (TOLD, OWNER)):
        path = record(tmp_path / "a.mcap", messages)
        assert stepscope("screenshot", str(path), "-o", "a.txt").exit_code == 0
        assert rights(tmp_path / "a.txt") == expected
