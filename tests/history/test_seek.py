"""Seeking in a recording is fast, and gives the same state as reading every message."""

import random
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Arrived, BatchRow, StepRecord
from stepscope.recordings.attribution.explained import explain_recording
from stepscope.recordings.file.chunk_cache import MessageFrame
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.history.ring.fast_forward import FastForward
from stepscope.recordings.history.ring.segment import decode_packed
from stepscope.recordings.packing.payloads import OpenPayloads
from stepscope.recordings.packing.steps import StepPacker
from stepscope.recordings.replay.reach import Reach
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.replay.seek import WINDOW_STEPS, excerpt, state_at, window_start, windows
from stepscope.recordings.state.session import SessionState
from tests.support.sessions.lanes_of import lanes_of
from tests.support.sessions.seek_sessions import assert_the_same, busy, one_by_one, record

NUM_STEPS = 3_000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("seek") / "long.mcap", enumerate(busy(2, NUM_STEPS)))


@pytest.mark.parametrize("seed", range(4))
def test_fast_forwarding_the_state_equals_applying_every_message(seed: int) -> None:
    messages = busy(seed, 400)
    rng = random.Random(seed)
    state = SessionState()
    packer = StepPacker(16)
    forward, since = FastForward(SessionState()), 0
    num_packed = 0
    for number, message in enumerate(messages):
        payload = wire.encode(message)
        state.apply(message)
        packed = packer.pack(payload) if isinstance(message, StepRecord) else None
        if packed is None:
            forward.take(wire.decode(payload))
        else:
            forward.advance(decode_packed(packed))
            num_packed += 1
        if rng.random() < 0.05:
            # Wherever it ends, postponed work is caught up.
            assert forward.finish() == state, f"{since} to {number}"
            forward, since = FastForward(state.copy()), number
            packer.reset()
    assert forward.finish() == state
    assert num_packed > 200


@pytest.mark.parametrize("block_size", [0, 1, 16])
def test_a_packed_batch_row_implies_the_same_block_count_as_an_unpacked_row(
    block_size: int,
) -> None:
    def step(number: int, rows: list[BatchRow]) -> StepRecord:
        return StepRecord(
            step=number,
            schedule_start_ns=number * 10,
            tokens_ns=number * 10 + 5,
            num_prefill_tokens=0,
            num_decode_tokens=len(rows),
            batch=rows,
            num_running=len(rows),
            num_waiting=0,
        )

    # One with too few blocks, one with room for all, one that leaves out a step.
    rows = [BatchRow(1, 1, 90, 1, 0, 2, 1), BatchRow(2, 1, 3, 1, 0, 9, 1)]
    rows.append(BatchRow(3, 1, 30, 1, 0, 2, 1))
    state, packer = SessionState(), StepPacker(block_size)
    forward = FastForward(SessionState())
    for number in range(60):
        record = step(number, [row for row in rows if number % 7 != 3 or row.request_id != 3])
        payload = wire.encode(record)
        state.apply(record)
        packed = packer.pack(payload)
        if packed is None:
            forward.take(wire.decode(payload))
        else:
            forward.advance(decode_packed(packed))
        size = block_size or 1 << 62
        for at, row in enumerate(rows):
            start = row.start + 1
            num_blocks = row.num_blocks + (start >= row.num_blocks * size)
            rows[at] = BatchRow(row.request_id, 1, start, 1, 0, num_blocks, 1)
    assert forward.finish() == state


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
@pytest.mark.parametrize("num_steps", [1, 150, 700])
def test_a_range_of_steps_loaded_at_once_equals_one_read_message_by_message(
    recorded: Path, num_steps: int
) -> None:
    rng = random.Random(num_steps)
    with Recording(recorded) as recording:
        for _ in range(2):
            step = rng.randrange(num_steps, NUM_STEPS)
            begin, end = recording.find_step(step - num_steps), recording.find_step(step)
            assert begin is not None
            assert end is not None
            found = excerpt(recording, History(), begin, end, lambda: True)
            assert found is not None
            expected = one_by_one(recording, begin, end)
            assert found.num_steps == num_steps
            assert_the_same(found, expected)
            # And it moves on and back like any other.
            further = recording.find_step(min(step + 40, NUM_STEPS - 1))
            assert further is not None
            for each in (found, expected):
                for frame, after in recording.frames(end, each.last_sequence or 0):
                    if after > further:
                        break
                    each.append(frame.sequence, frame.payload)
            assert_the_same(found, expected)
            for each in (found, expected):
                assert each.rewind(step - num_steps // 2)
            assert_the_same(found, expected)


@pytest.mark.slow
def test_latency_windows_after_a_seek_equal_those_read_message_by_message(recorded: Path) -> None:
    with Recording(recorded) as recording:
        for step, shown in ((NUM_STEPS - 1, 118), (NUM_STEPS - 700, 2_000), (900, 118)):
            end = recording.find_step(step)
            assert end is not None
            found = windows(recording, History(), step, shown, end, lambda: True)
            assert found is not None
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


def test_waits_that_began_before_the_file_are_in_no_figure_and_no_explanation(
    tmp_path: Path,
) -> None:
    """The operator may have paused the engine during these waits."""
    messages, state = busy(4, 500), SessionState()
    joined = next(n for n, m in enumerate(messages) if isinstance(m, StepRecord) and m.step == 150)
    for message in messages[:joined]:
        state.apply(message)
    snapshot = state.snapshot(joined - 1)
    assert snapshot is not None
    live = [view for view in snapshot.requests if view.status != "finished"]
    assert any(view.first_token_ns is None for view in live)
    assert any(view.first_token_ns is not None for view in live)
    told = enumerate([snapshot, *messages[joined:]], start=joined - 1)
    with Recording(record(tmp_path / "joined.mcap", told)) as recording:
        explained = explain_recording(recording, 50, 500)
        source = ReplaySource(recording, playing=False)
        source.start()
        try:
            for step in (400, 499):
                source.seek(step)
                assert source.wait()
            history = source.history
            assert history.first_step == 150
            latencies = history.windows.latency(None, None)
            assert latencies.ttft.num_samples == explained.ttft.num_waits
            assert latencies.itl.num_samples == explained.itl.num_waits
            known_ns = {
                event.request_id
                for message in messages[joined:]
                for event in getattr(message, "events", ())
                if isinstance(event, Arrived)
            }
            summaries = [each for each in history.summaries(150, 499) if each is not None]
            ids = {s.max_ttft_request_id for s in summaries if s.max_ttft_request_id is not None}
            assert ids
            assert ids <= known_ns
        finally:
            source.stop()


class Broken(list[MessageFrame]):
    """Frames of a chunk that differ from those in the file."""

    def __init__(self, frames: list[MessageFrame], topics: list[bytes]) -> None:
        super().__init__(frames)
        self.topics = topics

    def bodies(self, first: int, last: int) -> list[tuple[int, bytes]]:
        return [(frame.sequence, frame.payload) for frame in self[first:last]]


def test_a_step_that_contradicts_the_one_before_it_is_skipped(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With damage that no checksum finds, the readable steps are shown without waiting."""
    with Recording(recorded) as recording:
        begin, end = recording.find_step(1_000), recording.find_step(1_500)
        assert begin is not None
        assert end is not None
        whole = one_by_one(recording, begin, end)
        chunk = recording.chunk(begin.chunk)
        bad = next(p for p in range(begin.message + 60, len(chunk)) if chunk.is_packed(p))
        message = msgspec.msgpack.decode(chunk.frames[bad].payload)
        message["batch"] = [message["batch"][0], 10_000]
        frames = list(chunk.frames)
        frames[bad] = frames[bad]._replace(payload=msgspec.msgpack.encode(message))
        monkeypatch.setattr(chunk, "frames", Broken(frames, chunk.frames.topics))
        found = excerpt(recording, History(), begin, end, lambda: True)
        assert found is not None
        assert recording.truncated
        assert found.last_step == whole.last_step
        assert 0 < found.num_steps < whole.num_steps
        assert found.gaps


def test_a_seek_shows_the_last_steps_at_once_and_full_latency_windows_when_it_is_done(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ReplaySource(Recording(recorded), playing=False)
    reached, go_on = threading.Event(), threading.Event()
    extend = Reach.extend

    def slowly(reach: Reach, *where: Any) -> None:
        reached.set()
        assert go_on.wait(60)
        extend(reach, *where)

    monkeypatch.setattr(Reach, "extend", slowly)
    source.start()
    assert source.wait()
    try:
        step = NUM_STEPS - 20
        source.seek(step)
        assert reached.wait(60)
        history = source.history
        assert history.last_step == step
        assert history.is_short
        assert history.num_steps == WINDOW_STEPS
        # Nothing is unpacked for the shown step.
        record = history.record(step)
        assert record is not None
        assert record.step == step
        payloads = history._timeline.ring.segments[-1].payloads
        assert isinstance(payloads, OpenPayloads)
        assert payloads.is_packed
        at_once = history.state, lanes_of(history, step - WINDOW_STEPS + 1, step)
        go_on.set()
        assert source.wait()
        assert not history.is_short
        assert history.num_steps > 1_000
        assert (history.state, lanes_of(history, step - WINDOW_STEPS + 1, step)) == at_once
        assert history.record(step) == record
    finally:
        go_on.set()
        source.stop()


def test_zooming_out_loads_the_steps_that_come_into_view(recorded: Path) -> None:
    with Recording(recorded) as recording:
        source = ReplaySource(recording, History(), playing=False)
        source.start()
        source.seek(NUM_STEPS - 1)
        assert source.wait()
        before = source.history.num_steps
        source.show(before + 300)
        assert source.wait()
        assert source.history.num_steps >= min(NUM_STEPS, before + 300)
        assert source.history.last_step == NUM_STEPS - 1
        source.stop()
