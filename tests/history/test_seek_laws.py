"""The short cuts of a seek: adding many steps at once equals adding them one by one."""

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.history.ring.fast_forward import FastForward, has_no_request
from stepscope.recordings.replay import seek
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.replay.seek import TURN_MESSAGES, excerpt
from stepscope.recordings.state.blocks import BlockMap, SoundMove
from stepscope.recordings.state.series.latency_samples import Samples
from stepscope.tui.views.charts.kv_map import merged
from stepscope.tui.views.theme import KV_GLYPHS
from tests.support.sessions.later import Later
from tests.support.sessions.seek_sessions import assert_the_same, busy, one_by_one, record

NUM_STEPS = 900
MESSAGES = Later(lambda: busy(5, NUM_STEPS))
FORWARD_SETTLE = FastForward.settle

ids = st.integers(0, 5)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1536), min_size=1, max_size=4), st.integers(0, 99))
def test_latency_samples_joined_rank_as_if_added_one_by_one(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    joined, each_one = Samples(), Samples()
    now_ns = 0
    for size in sizes:
        times = [now_ns := now_ns + rng.randrange(-3, 9) for _ in range(size)]
        values = [rng.choice((rng.randrange(1000), 2**80)) for _ in range(size)]
        weights = [rng.randrange(1, 9) for _ in range(size)]
        part = Samples()
        for sample in zip(times, values, weights, strict=True):
            part.add(*sample)
            each_one.add(*sample)
        joined = part.after(joined)
        for each in (joined, each_one):
            each.forget_before(now_ns // 3)
        assert list(joined) == list(each_one)
        ranked, expected = joined.ranked(), each_one.ranked()
        assert (ranked is None) == (expected is None)
        if ranked is not None and expected is not None:
            assert ranked.percentiles((1, 50, 99)) == expected.percentiles((1, 50, 99))


moves = st.lists(
    st.tuples(st.integers(-3, 20), st.integers(-(2**63), 2**64 - 1) | ids, ids), max_size=9
)


@given(moves)
def test_block_moves_applied_during_decoding_have_the_same_effect_as_afterwards(
    told_moves: list[tuple[int, int, int]],
) -> None:
    payload = msgspec.msgpack.encode(told_moves)
    expected = BlockMap(array("q", [-2] * 16), array("q", [0] * 16))
    found = expected.copy()
    expected.apply(msgspec.msgpack.decode(payload, type=list[wire.BlockMove]))
    try:
        sound: Sequence[wire.BlockMove] = msgspec.msgpack.decode(payload, type=list[SoundMove])
    except msgspec.ValidationError:
        limit = 1 << 62
        assert any(b < 0 or abs(o) >= limit or abs(n) >= limit for b, o, n in told_moves)
    else:
        found.apply(sound)
        assert found == expected


@given(st.lists(st.tuples(st.integers(-2, 5), ids, ids), max_size=9))
def test_a_block_map_is_expanded_from_runs_of_equal_blocks(
    runs: list[tuple[int, int, int]],
) -> None:
    found = BlockMap.from_runs([wire.BlockRun(*run) for run in runs])
    assert found is not None
    assert list(found.owner) == [owner for count, owner, _ in runs for _ in range(count)]
    assert list(found.refs) == [refs for count, _, refs in runs for _ in range(count)]


@given(st.text(KV_GLYPHS, max_size=120), st.integers(0, 90))
def test_a_kv_map_cell_of_several_blocks_shows_the_most_frequent_state(
    states: str, num_cells: int
) -> None:
    cells, num = merged(states, num_cells), len(states)
    if num <= num_cells:
        assert cells == states
        return
    assert len(cells) == num_cells
    for cell, state in enumerate(cells):
        group = states[num * cell // num_cells : num * (cell + 1) // num_cells]
        most = max(group.count(each) for each in KV_GLYPHS)
        assert state == [each for each in KV_GLYPHS if group.count(each) == most][-1]


# Whole stretches with something unusual in them


def with_a_gap(messages: list[wire.Telemetry]) -> list[tuple[int, wire.Telemetry]]:
    return [each for each in enumerate(messages) if each[0] not in range(700, 709)]


def with_a_clock_set_back(messages: list[wire.Telemetry]) -> list[tuple[int, wire.Telemetry]]:
    back_ns = 5_000_000_000
    return [
        (number, _earlier(message, back_ns) if number > 700 else message)
        for number, message in enumerate(messages)
    ]


def _earlier(message: wire.Telemetry, by_ns: int) -> wire.Telemetry:
    names = ("schedule_start_ns", "schedule_end_ns", "launch_ns", "tokens_ns", "time_ns")
    known = {name: getattr(message, name, None) for name in names}
    times = {name: max(0, ns - by_ns) for name, ns in known.items() if ns is not None}
    return msgspec.structs.replace(message, **times) if times else message


def with_steps_told_twice(messages: list[wire.Telemetry]) -> list[tuple[int, wire.Telemetry]]:
    return list(enumerate([*messages[:710], *messages[690:]]))


def with_moves_that_cannot_be(messages: list[wire.Telemetry]) -> list[tuple[int, wire.Telemetry]]:
    told = list(messages)
    for number, move in ((650, wire.BlockMove(10**6, 3, 1)), (720, wire.BlockMove(3, 2**62, 1))):
        at = next(n for n in range(number, len(told)) if isinstance(told[n], wire.StepRecord))
        record_ = told[at]
        assert isinstance(record_, wire.StepRecord)
        told[at] = msgspec.structs.replace(record_, moves=[*record_.moves, move])
    return list(enumerate(told))


def with_signs_of_life(messages: list[wire.Telemetry]) -> list[tuple[int, wire.Telemetry]]:
    """Adds heartbeats; some report a request as aborted although it continues."""
    told: list[wire.Telemetry] = []
    for number, message in enumerate(messages):
        told.append(message)
        if isinstance(message, wire.StepRecord) and number % 20 == 0:
            ended = [wire.Aborted(message.batch[0].request_id, "client")] if message.batch else []
            status = wire.EngineStatus(
                time_ns=message.tokens_ns + 1,
                state="running",
                step=message.step,
                num_running=message.num_running,
                num_waiting=message.num_waiting,
                kv=message.kv,
                events=[*ended] if number % 100 == 0 else [],
            )
            told.append(status)
    return list(enumerate(told))


Change = Callable[[list[wire.Telemetry]], list[tuple[int, wire.Telemetry]]]


@pytest.mark.parametrize(
    "change",
    [
        with_a_gap,
        with_a_clock_set_back,
        with_steps_told_twice,
        with_moves_that_cannot_be,
        with_signs_of_life,
    ],
)
def test_a_range_with_unusual_messages_loads_as_if_read_message_by_message(
    tmp_path: Path, change: Change
) -> None:
    with Recording(record(tmp_path / "odd.mcap", change(MESSAGES))) as recording:
        last = recording.last_step
        assert last is not None
        for first, end_step in ((last - 420, last - 5), (last - 300, last - 210)):
            begin, end = recording.find_step(first), recording.find_step(end_step)
            assert begin is not None
            assert end is not None
            found = excerpt(recording, History(), begin, end, lambda: True)
            assert found is not None
            assert_the_same(found, one_by_one(recording, begin, end))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("laws") / "busy.mcap", enumerate(MESSAGES))


@pytest.mark.parametrize("limits", [{"max_steps": 260}, {"max_bytes": 120_000}])
def test_steps_loaded_at_once_are_forgotten_as_if_loaded_one_by_one(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """With limits that one stretch exceeds."""
    with Recording(recorded) as recording:
        begin, end = recording.find_step(100), recording.find_step(NUM_STEPS - 10)
        assert begin is not None
        assert end is not None
        found = excerpt(recording, History(**limits), begin, end, lambda: True)
        monkeypatch.setattr(seek, "TURN_MESSAGES", 1)
        expected = excerpt(recording, History(**limits), begin, end, lambda: True)
        assert found is not None
        assert expected is not None
        assert expected.num_steps < NUM_STEPS - 200
        assert_the_same(found, expected)


def test_a_status_message_without_requests_leaves_pending_batch_rows_unapplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = with_signs_of_life(MESSAGES)
    told = [message for _, message in messages if isinstance(message, wire.EngineStatus)]
    quiet = [message for message in told if has_no_request(message)]
    assert 10 < len(quiet) < len(told)
    num_settled: list[int] = []
    with Recording(record(tmp_path / "living.mcap", messages)) as recording:
        begin, end = recording.find_step(100), recording.find_step(NUM_STEPS - 10)
        assert begin is not None
        assert end is not None
        for tells_none in (has_no_request, lambda _: False):
            settled: list[FastForward] = []

            def settle(forward: FastForward, settled: list[FastForward] = settled) -> None:
                settled.append(forward)
                FORWARD_SETTLE(forward)

            with monkeypatch.context() as patch:
                patch.setattr(FastForward, "settle", settle)
                patch.setattr(seek, "has_no_request", tells_none)
                found = excerpt(recording, History(), begin, end, lambda: True)
            assert found is not None
            assert_the_same(found, one_by_one(recording, begin, end))
            num_settled.append(len(settled))
    assert num_settled[0] < num_settled[1]


def test_messages_read_together_from_a_chunk_equal_those_read_frame_by_frame(
    recorded: Path,
) -> None:
    with Recording(recorded) as recording:
        chunk = recording.chunk(0)
        expected = [(frame.sequence, frame.payload) for frame in chunk.frames]
        assert chunk.frames.bodies(0, len(chunk)) == expected
        assert chunk.frames.bodies(7, 30) == expected[7:30]
        place = 0
        while place < len(chunk):
            end = chunk.end_of_run(place, len(chunk))
            assert all(chunk.is_packed(each) for each in range(place, end))
            assert end == len(chunk) or not chunk.is_packed(end)
            assert chunk.end_of_run(place, min(place + 3, end)) == min(place + 3, end)
            place = end + 1


def test_loading_a_range_of_steps_can_be_stopped_every_few_messages(recorded: Path) -> None:
    with Recording(recorded) as recording:
        begin, end = recording.find_step(100), recording.find_step(800)
        assert begin is not None
        assert end is not None
        turns: list[None] = []
        assert excerpt(recording, History(), begin, end, lambda: not turns.append(None))
        assert len(turns) >= 700 // (2 * TURN_MESSAGES)
        assert excerpt(recording, History(), begin, end, lambda: False) is None


def test_the_seek_callback_runs_when_the_sought_step_is_shown(recorded: Path) -> None:
    source = ReplaySource(Recording(recorded), playing=False)
    shown: list[int | None] = []
    source.on_found = lambda: shown.append(None if source.is_seeking else source.history.last_step)
    source.start()
    try:
        assert source.wait()
        shown.clear()
        for step in (700, 250):
            source.seek(step)
            assert source.wait()
        source.skip(3)
        assert source.wait()
        assert shown == [700, 250, 253]
    finally:
        source.stop()


def test_a_step_from_a_file_is_decoded_like_one_from_an_engine(recorded: Path) -> None:
    """Its block moves too, which are applied while they are decoded."""
    with Recording(recorded) as recording:
        begin, end = recording.find_step(300), recording.find_step(400)
        assert begin is not None
        assert end is not None
        found = excerpt(recording, History(), begin, end, lambda: True)
        assert found is not None
        at_hand = found.record(400)
        expected = next(m for m in MESSAGES if isinstance(m, wire.StepRecord) and m.step == 400)
        assert at_hand == wire.decode(wire.encode(expected))
