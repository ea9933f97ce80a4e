"""The steps in memory can be saved as a file that equals a recording from the start."""

from pathlib import Path

import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Mark, StepRecord, Telemetry
from stepscope.recordings.check.verify import VerifyReport, verify
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.history.memory_file import write_memory
from stepscope.recordings.history.timeline import Follower
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.later import Later

MESSAGES = Later(lambda: simulate(seed=5, num_steps=900))


def filled(lost: range = range(0), **kept: int) -> History:
    """A history of all messages but those `lost`."""
    history = History(SLO(ttft_ms=700, itl_ms=70), **kept)
    for sequence, message in MESSAGES:
        if sequence not in lost:
            history.append(sequence, message)
    return history


def written(history: History, path: Path) -> VerifyReport:
    num_steps = write_memory(history, path, lambda share: None)
    report = verify(path, lambda share: None)
    assert num_steps == report.num_steps
    return report


def steps_in(path: Path) -> dict[int, tuple[int, bytes]]:
    """Number and payload of each step."""
    with Recording(path) as recording:
        frames = [frame for frame, _ in recording.frames() if frame.topic == StepRecord.topic]
    return {wire.decode(frame.payload).step: (frame.sequence, frame.payload) for frame in frames}


def sent(messages: list[tuple[int, Telemetry]]) -> dict[int, tuple[int, bytes]]:
    return {
        message.step: (sequence, wire.encode(message))
        for sequence, message in messages
        if isinstance(message, StepRecord)
    }


@pytest.mark.parametrize(("max_steps", "num_kept"), [(10_000, (900, 901)), (300, (300, 600))])
def test_a_file_saved_from_memory_holds_every_step_in_memory_and_is_sound(
    tmp_path: Path, max_steps: int, num_kept: tuple[int, int]
) -> None:
    history = filled(max_steps=max_steps)
    report = written(history, tmp_path / "memory.mcap")
    assert (report.is_good, report.num_lost_messages) == (True, 0)
    expected = {step: each for step, each in sent(MESSAGES).items() if step >= history.first_step}
    assert len(expected) in range(*num_kept)
    assert steps_in(tmp_path / "memory.mcap") == expected


def test_messages_lost_before_saving_are_counted_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "memory.mcap"
    sequences = [sequence for sequence, message in MESSAGES if isinstance(message, StepRecord)]
    lost = range(sequences[400], sequences[400] + 7)
    report = written(filled(lost), path)
    assert report.num_lost_messages == 7
    assert steps_in(path).keys() == sent([m for m in MESSAGES if m[0] not in lost]).keys()


def test_messages_lost_right_after_joining_are_counted_in_the_file(tmp_path: Path) -> None:
    state = SessionState()
    for _, message in MESSAGES[:701]:
        state.apply(message)
    history = History()
    joined_with = state.snapshot(MESSAGES[700][0])
    history.reset(joined_with)
    for sequence, message in MESSAGES[704:]:
        history.append(sequence, message)
    report = written(history, tmp_path / "memory.mcap")
    assert report.num_lost_messages == 3
    assert [check.name for check in report.checks if check.problems] == ["sequence"]


def test_a_file_counts_forgotten_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = filled(range(MESSAGES[600][0], MESSAGES[-1][0] + 1), max_steps=300)
    follow = history.follow

    def overtaken(first: int | None = None) -> Follower:
        follower = follow(first)
        for sequence, message in MESSAGES[600:]:
            history.append(sequence, message)
        return follower

    monkeypatch.setattr(history, "follow", overtaken)
    report = written(history, tmp_path / "memory.mcap")
    assert report.num_lost_messages > 0
    assert [check.name for check in report.checks if check.problems] == ["sequence"]


def test_marks_and_service_levels_are_saved_with_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "memory.mcap"
    history = filled()
    history.add_mark(Mark(step=40, time_ns=0, text="here", who="me"))
    written(history, path)
    with Recording(path) as recording:
        marks = [wire.decode(f.payload) for f, _ in recording.frames() if f.topic == Mark.topic]
        assert [(mark.step, mark.text) for mark in marks] == [(40, "here")]
        assert float(recording.metadata["slo_itl_ms"]) == 70


def test_interrupting_the_saving_of_memory_leaves_no_file(tmp_path: Path) -> None:
    def enough(share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_memory(filled(), tmp_path / "memory.mcap", enough)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_saving_of_memory_touches_no_file(tmp_path: Path) -> None:
    path = tmp_path / "memory.mcap"
    with pytest.raises(RecordingError, match="no step in memory"):
        write_memory(History(), path, lambda share: None)
    assert not path.exists()
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_memory(filled(), path, lambda share: None)
    assert path.read_bytes() == b"mine"
