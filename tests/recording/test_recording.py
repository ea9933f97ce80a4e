"""Recordings: a replay shows what was seen live, and no broken file ends in a traceback."""

import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from mcap.writer import Writer

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo, Snapshot, StepRecord
from stepscope.recordings.check.verify import verify
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import default_name
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.writing import recording_file
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import add_mark
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.crowded import crowded
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.lanes_of import lanes_of
from tests.support.sessions.received import Received
from tests.support.sessions.replayed import replayed, seek
from tests.support.sessions.seek_sessions import record
from tests.support.waiting import wait_for

NUM_STEPS = 4000
CHANGES = {1250: {"max_num_batched_tokens": 256}}
MESSAGES = crowded(7, NUM_STEPS, rate=8.0, changes=CHANGES, floor_ms=20.0)  # more than a minute


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "session.mcap", MESSAGES)


@pytest.fixture(scope="module")
def live() -> History:
    return history_of(MESSAGES, SLO())


@pytest.fixture
def replay(recorded: Path) -> Iterator[ReplaySource]:
    with replayed(recorded) as source:
        yield source


# The same again


def same_screen(live: History, replayed: History, step: int) -> None:
    """Everything the main screen draws at `step`: state, lanes, figures, latencies, stalls."""
    assert replayed.last_step == step
    assert replayed.state == live.state_at(step)
    assert lanes_of(replayed, step - 200, step) == lanes_of(live, step - 200, step)
    first = max(0, step - 200)
    assert replayed.summaries(first, step) == live.summaries(first, step)
    summary = live.summary(step)
    assert replayed.windows.latency(summary.tokens_ns) == live.windows.latency(summary.tokens_ns)
    sums, live_sums = (each.windows.sums(summary.tokens_ns, 10.0) for each in (replayed, live))
    assert sums == live_sums
    assert replayed.stall(step) == live.stall(step)
    assert replayed.record(step) == live.record(step)
    assert replayed.wall_ns(0) == live.wall_ns(0)


@pytest.mark.slow
def test_a_replay_shows_at_any_step_what_was_seen_live(live: History, replay: ReplaySource) -> None:
    steps = [1, NUM_STEPS - 1, NUM_STEPS - 2, 300, *random.Random(2).sample(range(NUM_STEPS), 2)]
    for step in steps:
        seek(replay, step)
        same_screen(live, replay.history, step)


def test_a_recorded_message_has_the_wall_time_of_its_step(live: History, recorded: Path) -> None:
    with Recording(recorded) as recording:
        position = recording.find_step(1234)
        frame = recording.frame_before(position)
        summary = live.summary(1234)
        assert frame.log_ns == live.wall_ns(summary.tokens_ns)
        after, _ = next(recording.frames(recording.find_time(frame.log_ns)))
        assert after.log_ns == frame.log_ns


def test_seeking_does_not_read_all_before(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    with Recording(recorded) as recording:
        num_chunks = len(recording.chunks)
        assert num_chunks > 3
        load = recording.chunks.load
        monkeypatch.setattr(recording.chunks, "load", lambda n: (loaded.append(n), load(n))[1])
        recording.find_step(NUM_STEPS // 2)
    assert len(set(loaded)) == 1


def test_sequence_numbers_above_32_bits_are_kept(tmp_path: Path) -> None:
    offset = 2**32 - 250
    received = [(sequence + offset, message) for sequence, message in MESSAGES[:500]]
    live = history_of(received, SLO())
    record(tmp_path / "long.mcap", received)
    with replayed(tmp_path / "long.mcap") as source:
        seek(source, 480)
        assert source.history.num_lost == 0
        assert source.history.summaries(0, 480) == live.summaries(0, 480)


# Playing


def test_playing_follows_recorded_time_and_stops_at_the_end(replay: ReplaySource) -> None:
    assert (replay.status, replay.history.last_step) == ("paused", 0)
    started_s = time.monotonic()
    replay.play(speed=64.0)
    assert replay.status == "playing"
    while replay.history.last_step < 600:
        time.sleep(0.005)
        assert time.monotonic() < started_s + 120
    # 600 steps of 20 ms or more, at 64 times their speed.
    assert time.monotonic() - started_s > 600 * 0.02 / 64
    replay.pause()
    assert replay.status == "paused"
    replay.seek(NUM_STEPS - 2)
    replay.play()
    while replay.status != "ended":
        time.sleep(0.005)
        assert time.monotonic() < started_s + 120
    assert replay.history.last_step == NUM_STEPS - 1
    replay.play()
    assert replay.wait()
    assert replay.status == "ended"


def test_stepping_through_a_replay_stops_at_both_ends(live: History, replay: ReplaySource) -> None:
    for num_steps, expected in ((1, 1), (10, 11), (-1, 10), (-100, 0), (300, 300), (-1, 299)):
        replay.skip(num_steps)
        assert replay.wait()
        assert replay.history.last_step == expected
        assert replay.history.state.requests == live.state_at(expected).requests
    replay.seek(10**9)
    replay.skip(1)
    assert replay.wait()
    assert replay.history.last_step == NUM_STEPS - 1
    assert replay.error is None


def test_a_recorded_mark_appears_in_the_replay(tmp_path: Path) -> None:
    source = Received(History(), "test")
    recorder = Recorder(source, tmp_path / "marked.mcap")
    for sequence, message in MESSAGES[:100]:
        source.take(sequence, message)
    mark = add_mark(source, "before the storm", "me")
    for sequence, message in MESSAGES[100:200]:
        source.take(sequence, message)
    recorder.stop()
    with replayed(tmp_path / "marked.mcap") as replay:
        seek(replay, 10**9)
        assert replay.history.marks == [mark]
        (event,) = replay.history.events(kinds=frozenset({"mark"}))
        assert event.text == "before the storm (me)"


# Recording a session that goes on


def test_recording_can_begin_in_mid_session_while_messages_arrive(tmp_path: Path) -> None:
    source = Received(History(), "test")
    going = threading.Event()

    def receive() -> None:
        for number, (sequence, message) in enumerate(MESSAGES):
            source.take(sequence, message)
            if number == 300:
                going.set()

    thread = threading.Thread(target=receive)
    thread.start()
    going.wait()
    recorder = Recorder(source, tmp_path / "middle.mcap")
    thread.join()
    recorder.stop()
    recorder.stop()
    assert (recorder.state, recorder.error) == ("finished", None)
    with Recording(tmp_path / "middle.mcap") as recording:
        steps = [
            wire.decode(frame.payload).step  # type: ignore[union-attr]
            for frame, _ in recording.frames()
            if frame.topic == b"step"
        ]
        assert steps == list(range(steps[0], NUM_STEPS))
        assert recorder.num_steps == len(steps)
        snapshot, _ = recording.keyframe_before(recording.find_time(0))
        assert SessionState.from_snapshot(snapshot) == source.history.state_at(snapshot.step) or (
            snapshot.step == steps[0] - 1
        )
    with replayed(tmp_path / "middle.mcap") as replay:
        seek(replay, NUM_STEPS)
        assert replay.history.num_lost == 0
        assert replay.history.state == source.history.state_at(NUM_STEPS - 1)


@pytest.mark.parametrize(("num_messages", "at"), [(200, "at step 1"), (2, "without a step")])
def test_a_recording_ends_when_its_engine_does(tmp_path: Path, num_messages: int, at: str) -> None:
    source = Received(History(), "test")
    for sequence, message in MESSAGES[:2]:
        source.take(sequence, message)
    recorder = Recorder(source, tmp_path / "one.mcap")
    for sequence, message in MESSAGES[2:num_messages]:
        source.take(sequence, message)
    for sequence, message in simulate(seed=8, num_steps=50):
        source.take(sequence, message)
    wait_for(lambda: recorder.state != "recording")
    source.take(sequence + 1, message)
    assert not source.tap._listeners
    seconds = recorder.elapsed_s
    assert f"the engine restarted: the recording ends {at}" in recorder.error
    recorder.stop()
    assert (recorder.state, recorder.elapsed_s) == ("finished", seconds)
    with Recording(tmp_path / "one.mcap") as recording:
        assert recording.info.engine_id == "simulated-7"
        assert recording.message is None


def test_a_replayed_recording_cannot_be_recorded(replay: ReplaySource, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="is a recording already"):
        Recorder(replay, tmp_path / "copy.mcap")


def test_default_names_are_plain_and_repeat_neither_prefix_nor_suffix_of_a_recording() -> None:
    assert default_name("127.0.0.1:5555").startswith("stepscope-127.0.0.1-5555-2")
    assert "/" not in default_name("../../etc")
    assert len(default_name("e" * 300)) < 255
    for name in ("noon.mcap", "stepscope-noon.mcap", "noon.mcap.part"):
        assert re.fullmatch(r"stepscope-noon-[\d-]+\.svg", default_name(name, ".svg"))


# Files that are broken


def refused(path: Path) -> str:
    with pytest.raises(RecordingError) as caught:
        Recording(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_a_later_schema_names_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = next(m for _, m in MESSAGES if isinstance(m, EngineInfo))
    messages = [(0, msgspec.structs.replace(info, schema_version=9))]
    messages += [(n, m) for n, m in MESSAGES[:50] if isinstance(m, StepRecord) and n > 0]
    monkeypatch.setattr(recording_file, "version", lambda name: "7.1.0")
    record(tmp_path / "later.mcap", messages)
    message = refused(tmp_path / "later.mcap")
    assert "schema 9" in message
    assert "install 7.1.0 or later" in message


def foreign(path: Path) -> None:
    with open(path, "wb") as stream:
        writer = Writer(stream)
        writer.start(profile="ros2")
        channel = writer.register_channel("/odom", "cdr", 0)
        writer.add_message(channel, 1, b"x", 1)
        writer.finish()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: path.write_bytes(b""), "is not a stepscope recording"),
        (lambda path: path.write_text("step,ms\n1,2\n"), "is not a stepscope recording"),
        (foreign, "is not a stepscope recording"),
        (lambda path: path.mkdir(), "cannot read"),
        (lambda path: None, "No such file"),
        (lambda path: record(path, []), "nothing to show"),
    ],
    ids=["empty", "text", "foreign", "folder", "missing", "nothing"],
)
def test_files_that_are_no_recordings_are_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], object], expected: str
) -> None:
    path = tmp_path / "file.mcap"
    make(path)
    assert expected in refused(path)


def test_recording_to_an_unwritable_path_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="cannot write"):
        RecordingWriter(tmp_path / "file" / "out.mcap")


def test_keyframes_are_at_most_256_messages_apart(recorded: Path) -> None:
    with Recording(recorded) as recording:
        keyframes = [frame for frame, _ in recording.frames() if frame.topic == b"keyframe"]
        assert max(b.sequence - a.sequence for a, b in itertools.pairwise(keyframes)) <= 256
        assert all(isinstance(wire.decode(frame.payload), Snapshot) for frame in keyframes)


@pytest.mark.slow
def test_keyframes_of_a_long_queue_are_at_most_half_of_the_file(tmp_path: Path) -> None:
    flood = SimulatedWorkload(rate=150.0, document_share=0.0, chat_tokens=20, shared_tokens=4)
    knobs = Knobs(max_num_batched_tokens=64, max_num_seqs=4)
    messages = simulate(seed=3, num_steps=3000, num_blocks=1024, workload=flood, knobs=knobs)
    path = tmp_path / "queue.mcap"
    record(path, messages)
    live = history_of(messages, SLO())
    assert live.state.num_waiting > 2000
    with Recording(path) as recording:
        frames = [frame for frame, _ in recording.frames()]
    keyframes = [frame for frame in frames if frame.topic == b"keyframe"]
    num_bytes = sum(len(wire.encode(message)) for _, message in messages)
    assert sum(len(frame.payload) for frame in keyframes[:-1]) <= num_bytes
    gaps = [b.sequence - a.sequence for a, b in itertools.pairwise(keyframes)]
    assert max(gaps) > 1.2 * 256  # of what a short queue would have
    assert verify(path, lambda share: None).is_good
    with replayed(path) as source:
        for step in (2990, 700, 1800):
            seek(source, step)
            assert source.history.state == live.state_at(step)
