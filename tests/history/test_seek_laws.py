"""What a seek is made of: samples that are joined, blocks in runs, reading that can be stopped."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.protocol import wire
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.replay.seek import TURN_MESSAGES, excerpt
from stepscope.recordings.state.blocks import BlockMap
from stepscope.tui.views.charts.kv_map import merged
from stepscope.tui.views.theme import KV_GLYPHS
from tests.support.sessions.later import Later
from tests.support.sessions.seek_sessions import busy, record

NUM_STEPS = 900
MESSAGES = Later(lambda: busy(5, NUM_STEPS))

ids = st.integers(0, 5)


@given(st.lists(st.tuples(st.integers(-2, 5), ids, ids), max_size=9))
def test_a_block_map_is_expanded_from_runs_of_blocks(runs: list[tuple[int, int, int]]) -> None:
    found = BlockMap.from_runs([wire.BlockRun(*run) for run in runs])
    assert list(found.owner) == [owner for count, owner, _ in runs for _ in range(count)]
    assert list(found.refs) == [refs for count, _, refs in runs for _ in range(count)]


@given(st.text(KV_GLYPHS, max_size=120), st.integers(0, 90))
def test_a_kv_map_cell_shows_its_most_frequent_state(states: str, num_cells: int) -> None:
    cells, num = merged(states, num_cells), len(states)
    if num <= num_cells:
        assert cells == states
        return
    assert len(cells) == num_cells
    for cell, state in enumerate(cells):
        group = states[num * cell // num_cells : num * (cell + 1) // num_cells]
        most = max(group.count(each) for each in KV_GLYPHS)
        assert state == [each for each in KV_GLYPHS if group.count(each) == most][-1]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("laws") / "busy.mcap", enumerate(MESSAGES))


def test_loading_a_range_of_steps_can_be_stopped_every_few_messages(recorded: Path) -> None:
    with Recording(recorded) as recording:
        begin, end = recording.find_step(100), recording.find_step(800)
        turns: list[None] = []
        assert excerpt(recording, History(), begin, end, lambda: not turns.append(None))
        assert len(turns) >= 700 // TURN_MESSAGES
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
