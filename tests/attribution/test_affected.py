"""The number of requests with late tokens tells how many users noticed a slowdown."""

from pathlib import Path

import pytest

from stepscope.recordings.attribution.explained import Affected, explain_recording
from stepscope.recordings.errors import NotInRecording
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.state.session import SessionState
from tests.attribution.test_explain import Script, paused_session
from tests.support.sessions.seek_sessions import record


def affected(path: Path, itl_ms: float, ttft_ms: float, only: int | None = None) -> Affected:
    with Recording(path) as recording:
        return explain_recording(recording, itl_ms, ttft_ms, only).affected


def test_waits_during_an_operators_pause_do_not_count_as_late(
    tmp_path: Path,
) -> None:
    path = record(tmp_path / "paused.mcap", paused_session())
    assert affected(path, 50, 500) == Affected(1, 0, 0)


def test_a_request_that_ended_before_the_recording_is_known_but_not_counted(
    tmp_path: Path,
) -> None:
    engine = Script()
    for _ in range(4):
        engine.submit(16, 3)
    engine.run(6)
    engine.submit(16, 40)
    engine.run(30)
    state = SessionState()
    begin = next(n for n, (_, m) in enumerate(engine.messages) if getattr(m, "step", 0) == 12)
    for _, message in engine.messages[:begin]:
        state.apply(message)
    snapshot = state.snapshot(begin - 1)
    assert [view.status for view in snapshot.requests].count("finished") == 4
    path = record(tmp_path / "later.mcap", [(begin - 1, snapshot), *engine.messages[begin:]])
    assert affected(path, 1, 1) == Affected(1, 1, 0)
    assert affected(path, 1, 1, only=0) == Affected(1, 0, 0)
    with pytest.raises(NotInRecording, match=r"\(r0 to r4\)"):
        affected(path, 1, 1, only=5)
