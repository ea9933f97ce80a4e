"""Seeking in a recording is fast, and gives the same state as reading every message."""

import random
from pathlib import Path

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Arrived, StepRecord
from stepscope.recordings.attribution.explained import explain_recording
from stepscope.recordings.file.chunk_cache import MessageFrame
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.seek import (
    WINDOW_STEPS,
    excerpt,
    state_at,
    window_start,
    windows,
)
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.sessions.lanes_of import lanes_of
from tests.support.sessions.replayed import replayed, seek, short_histories
from tests.support.sessions.seek_sessions import assert_the_same, busy, one_by_one, record

NUM_STEPS = 3_000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("seek") / "long.mcap", enumerate(busy(2, NUM_STEPS)))


def test_the_state_at_a_file_position_includes_all_messages_before_it(recorded: Path) -> None:
    rng = random.Random(7)
    with Recording(recorded) as recording:
        states = {}
        wanted = sorted(rng.sample(range(NUM_STEPS), 15))
        state = SessionState()
        for frame, after in recording.frames():
            state.apply(wire.decode(frame.payload))
            if frame.topic == b"step" and state.step in wanted:
                states[state.step] = after, state.copy(), frame.sequence
        assert len(states) == 15
        for step in rng.sample(wanted, 15):
            position, expected, sequence = states[step]
            assert recording.find_step(step) == position
            assert state_at(recording, position) == (expected, sequence)
        first, _ = state_at(recording, Position(0, 0))
        assert first.info == recording.info


@pytest.mark.slow
def test_latency_windows_after_a_seek_equal_those_read_message_by_message(recorded: Path) -> None:
    with Recording(recorded) as recording:
        for step, shown in ((NUM_STEPS - 1, 118), (NUM_STEPS - 700, 2_000), (900, 118)):
            end = recording.find_step(step)
            found = windows(recording, History(), step, shown, end, lambda: True)
            expected = History()
            snapshot, begin = window_start(recording, step, shown)
            expected.reset(snapshot)
            for frame, after in recording.frames(begin, snapshot.sequence):
                if after > end:
                    break
                expected.append(frame.sequence, frame.payload)
            assert_the_same(found, expected)
            # Steps already in memory are not read again.
            assert windows(recording, found, step, shown, end, lambda: True) is None


def test_waits_that_began_before_the_file_are_in_no_figure(tmp_path: Path) -> None:
    """The operator may have paused the engine during these waits."""
    messages, state = busy(4, 500), SessionState()
    joined = next(n for n, m in enumerate(messages) if isinstance(m, StepRecord) and m.step == 150)
    for message in messages[:joined]:
        state.apply(message)
    snapshot = state.snapshot(joined - 1)
    live = [view for view in snapshot.requests if view.status != "finished"]
    assert any(view.first_token_ns is None for view in live)
    assert any(view.first_token_ns is not None for view in live)
    told = enumerate([snapshot, *messages[joined:]], start=joined - 1)
    with replayed(record(tmp_path / "joined.mcap", told)) as source:
        explained = explain_recording(source.recording, SLO(0.001, 0.001))
        for step in (400, 499):
            seek(source, step)
        history = source.history
        assert history.first_step == 150
        latencies = history.windows.latency(None, None)
        assert latencies.ttft.num_samples == explained.ttft.num_waits
        assert latencies.itl.num_samples == explained.itl.num_waits
        events = [e for each in messages[joined:] for e in getattr(each, "events", ())]
        known = {event.request_id for event in events if isinstance(event, Arrived)}
        ids = {each.max_ttft_request_id for each in history.summaries(150, 499) if each}
        assert set() < ids - {None} <= known


class Broken(list[MessageFrame]):
    """Frames of a chunk that differ from those in the file."""

    def __init__(self, frames: list[MessageFrame], topics: list[bytes]) -> None:
        super().__init__(frames)
        self.topics = topics


def test_a_contradicting_step_is_skipped(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With damage that no checksum finds, the readable steps are shown without waiting."""
    with Recording(recorded) as recording:
        begin, end = recording.find_step(1_000), recording.find_step(1_500)
        whole = one_by_one(recording, begin, end)
        chunk = recording.chunks.load(begin.chunk)
        bad = next(p for p in range(begin.message + 60, len(chunk)) if p in chunk._packed)
        message = msgspec.msgpack.decode(chunk.frames[bad].payload)
        message["batch"] = [message["batch"][0], 10_000]
        frames = list(chunk.frames)
        frames[bad] = frames[bad]._replace(payload=msgspec.msgpack.encode(message))
        monkeypatch.setattr(chunk, "frames", Broken(frames, chunk.frames.topics))
        found = excerpt(recording, History(), begin, end, lambda: True)
        assert recording.truncated
        assert found.last_step == whole.last_step
        assert 0 < found.num_steps < whole.num_steps
        assert found.gaps


def test_a_seek_shows_some_steps_at_once(recorded: Path) -> None:
    with replayed(recorded) as source, short_histories() as (reached, go_on):
        step = NUM_STEPS - 20
        source.seek(step)
        assert reached.wait(60)
        history = source.history
        assert history.last_step == step
        assert history.is_short
        assert history.num_steps == WINDOW_STEPS
        record = history.record(step)
        assert record.step == step
        at_once = history.state, lanes_of(history, step - WINDOW_STEPS + 1, step)
        go_on.set()
        assert source.wait()
        assert not history.is_short
        assert history.num_steps > 1_000
        assert (history.state, lanes_of(history, step - WINDOW_STEPS + 1, step)) == at_once
        assert history.record(step) == record


def test_zooming_out_loads_the_steps_that_come_into_view(recorded: Path) -> None:
    with replayed(recorded) as source:
        seek(source, NUM_STEPS - 1)
        before = source.history.num_steps
        source.show(before + 300)
        assert source.wait()
        assert source.history.num_steps >= min(NUM_STEPS, before + 300)
        assert source.history.last_step == NUM_STEPS - 1
