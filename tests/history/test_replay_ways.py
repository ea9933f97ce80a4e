"""The figures at a step of a recording do not depend on how the viewer got there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Mark
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.latency import SLO
from stepscope.tui.session.navigator import Navigator
from stepscope.tui.views.frame.frame import NOTABLE, Frame
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.notices import Notices
from stepscope.tui.views.panels import header, latency_panel
from stepscope.tui.views.view import View
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.screens.screen_text import line_texts
from tests.support.sessions.replayed import replayed, short_histories
from tests.support.sessions.seek_sessions import one_by_one, record

NUM_STEPS = 5_000  # three minutes


class Way:
    """The part of a screen that moves through time."""

    def __init__(self, source: ReplaySource) -> None:
        self.view = View()
        self.notices = Notices(lambda: 0.0)
        self.source = source
        self.navigator = Navigator(self.view, source, self.notices, str)
        self.now_s = 0.0
        self.builder = FrameBuilder(source.history, source.extent, lambda: self.now_s)

    def said(self) -> str:
        return "".join(text for text, _ in self.notices.line([], 200)).strip()

    def picture(self) -> Frame:
        """The picture once all loading has ended."""
        for _ in range(2):  # the first picture tells the replay which steps are shown
            assert self.source.wait(30)
            self.source.look_at(self.view.cursor)
        assert self.source.wait(30)
        self.now_s += 10  # figures of the newest step are recomputed once a second
        return self.builder.build(self.view, 100, 20, 10)


def line_of(frame: Frame) -> str:
    """The line of key figures."""
    return "".join(text for line in header.key_figures(frame, 300, 1, 0) for text, _ in line)


def figures(frame: Frame) -> object:
    assert not frame.history.is_short
    return frame.cursor, frame.latency, frame.recent, frame.minute, frame.stall


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    messages = simulate(
        seed=9,
        num_steps=NUM_STEPS,
        num_blocks=150,
        max_model_len=2048,
        knobs=Knobs(max_num_batched_tokens=256, reserve="none"),
        workload=SimulatedWorkload(rate=1.5, document_share=0.1, document_tokens=1500),
        cost=CostModel(floor_ms=30.0),
    )
    return record(tmp_path_factory.mktemp("ways") / "session.mcap", messages)


@pytest.fixture(scope="module")
def source(file: Path) -> Iterator[ReplaySource]:
    """One replay for several tests: its memory depends on those before."""
    with replayed(file) as replay:
        assert replay.file_index.wait(30)
        yield replay


@pytest.fixture(scope="module")
def straight(file: Path) -> Iterator[ReplaySource]:
    with replayed(file) as replay:
        yield replay


@settings(max_examples=5)
@example(moves=[NUM_STEPS - 1, 4_014])  # a minute before, the engine was idle
@given(
    moves=st.lists(
        st.one_of(
            st.integers(0, NUM_STEPS - 1),
            st.sampled_from(["back to a preemption", "on to a preemption", "back", "on"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_figures_at_a_step_do_not_depend_on_the_moves_that_led_to_it(
    source: ReplaySource, straight: ReplaySource, moves: list[int | str]
) -> None:
    way = Way(source)
    for move in moves:
        if isinstance(move, int):
            way.navigator.go(move)
        elif move.endswith("preemption"):
            way.navigator.event(1 if move.startswith("on") else -1, {"preempt"})
        else:
            way.navigator.move(40 if move == "on" else -40)
        frame = way.picture()
        straight.seek(frame.cursor)
        assert figures(frame) == figures(Way(straight).picture())


def test_steps_after_the_viewed_step_stay_in_memory(file: Path) -> None:
    with replayed(file) as replay:
        way = Way(replay)
        way.navigator.go(NUM_STEPS - 1)
        first = way.picture().first_step
        assert first > 1_000
        way.navigator.go(first + 10)
        frame = way.picture()
        assert (frame.cursor, frame.last_step) == (first + 10, NUM_STEPS - 1)
        assert frame.first_step < first


def test_with_a_full_memory_no_step_is_missing_and_short_windows_are_marked(file: Path) -> None:
    with replayed(file, History(max_steps=1_500)) as replay:
        way = Way(replay)
        way.navigator.go(NUM_STEPS - 1)
        first = way.picture().first_step
        way.navigator.go(first + 400)
        frame = way.picture()
        assert frame.cursor == first + 400
        assert frame.first_step <= first
        assert not frame.history.is_short
        assert 0 < frame.window_s < 60
        told = line_of(frame)
        seconds = f"/{frame.window_s:.0f}s"
        for name in ("TTFT p95", "ITL p99", "LIMIT"):
            assert f"{name}{seconds} " in told
        assert re.search(rf"PREEMPT \d+{seconds}", told)
        assert re.search(r"hit [\d—].* out \d", told)  # these figures cover ten seconds
        for width in (60, 120):
            (line,) = latency_panel.one_line(frame, width, 1, 0)
            assert f" {frame.window_s:.0f} s: TTFT" in "".join(text for text, _ in line)
        way.navigator.go(frame.first_step + 100)
        frame = way.picture()
        assert frame.window_s < 10
        told = line_of(frame)
        for name in ("hit", "out", "TTFT p95"):
            assert f"{name}/{frame.window_s:.1f}s " in told


def test_figures_of_short_windows_are_marked(file: Path) -> None:
    with replayed(file) as replay:
        way = Way(replay)
        way.picture()
        with short_histories() as (reached, go_on):
            replay.seek(NUM_STEPS - 1)
            assert reached.wait(30)
            frame = way.builder.build(way.view, 100, 20, 10)
            assert frame.history.is_short
            told = line_of(frame)
            assert re.search(r" hit — .* TTFT p95 — .* ITL p99 — .* out — tok/s  in — tok/s", told)
            assert re.search(r"PREEMPT \d+/\ds ", told)
            assert "LIMIT — " in told
            wall = line_texts(latency_panel.draw(frame, 80, 8, 0))[6]
            assert re.search(r"wall model —  sched —  idle —  mixed steps — ", wall)
            go_on.set()
            told = line_of(way.picture())
            assert re.search(r" hit .* TTFT p95 \d.* PREEMPT \d+/m .* out \d.* in \d", told)


@pytest.fixture
def unsearched(file: Path) -> Iterator[ReplaySource]:
    """A replay whose file was not yet searched."""
    with replayed(file) as replay:
        replay.file_index.stop()
        replay.file_index = FileIndex(file)
        yield replay


def test_a_jump_to_an_event_says_that_the_file_is_still_searched(unsearched: ReplaySource) -> None:
    way = Way(unsearched)
    way.picture()
    assert unsearched.history.last_step == 0
    unsearched.history.add_mark(Mark(step=700, time_ns=0, text="here", who="me"))
    way.navigator.event(1)
    assert way.said() == "here (me); the file is still searched"


def test_in_a_replay_late_tokens_are_found_in_the_whole_file(source: ReplaySource) -> None:
    assert source.file_index.wait(30)
    way = Way(source)
    for slo in (SLO(ttft_ms=100.0, itl_ms=70.0), SLO(ttft_ms=5_000.0, itl_ms=100.0)):
        source.history.set_slo(slo)  # which needs no new search
        way.navigator.go(0)
        at = way.picture().cursor
        assert at == 0
        for _ in range(4):
            late = source.file_index.next(at, 1, {"slo"}, slo)
            if late is None:
                break
            way.navigator.event(1, {"slo"})
            assert way.said() == late.text
            at = way.picture().cursor
            assert at == late.step
            summary = source.history.summary(late.step)
            waits_ns = (summary.max_itl_ns or 0, summary.max_ttft_ns or 0)
            assert waits_ns[0] > slo.itl_ms * 1e6 or waits_ns[1] > slo.ttft_ms * 1e6
        assert at != 0
    source.history.set_slo(SLO())


def test_unsearched_is_never_called_empty(source: ReplaySource, unsearched: ReplaySource) -> None:
    assert source.file_index.wait(30)
    last = source.file_index.next(NUM_STEPS - 1, -1, NOTABLE - {"slo"}, SLO())
    for replay in (source, unsearched):
        replay.history.set_slo(SLO(ttft_ms=1e9, itl_ms=1e9))
        way = Way(replay)
        way.navigator.go(NUM_STEPS - 1)
        way.picture()
        way.navigator.event(1)
        assert way.said() == f"no event after step {NUM_STEPS - 1:,}, the last of the file"
        way.navigator.go(0)
        way.picture()
        way.navigator.go(last.step)
        way.picture()
        way.navigator.event(1)
        where = f"after step {last.step:,}"
        if replay is source:
            assert way.said() == f"no event {where} in all of the file"
        else:
            assert way.said() == f"no event {where}; the file is still searched"
            ended = FileIndex(Path("nowhere.mcap"))  # as when nothing more is searched
            ended.start()
            assert ended.wait(30)
            replay.file_index = ended
            way.navigator.event(1)
            assert way.said() == f"no event {where}; not all of the file could be searched"
        replay.history.set_slo(SLO())


def test_steps_older_than_those_in_memory_are_not_reported_as_missing(file: Path) -> None:
    with Recording(file) as recording:
        last = recording.last_step
        whole = one_by_one(recording, Position(0, 0), recording.find_step(last))
        breach = max(whole.windows.breaches(None, NUM_STEPS), key=lambda each: each.ns)
        late = whole.wait(breach.step, breach.request_id)
        assert not any(piece.cause == "unknown" for piece in late.pieces)
        begin = recording.find_step(breach.step - 3)
        cut = one_by_one(recording, begin, recording.find_step(last))
        late = cut.wait(breach.step, breach.request_id)
        assert late.gap_ns == sum(piece.ns for piece in late.pieces)
        assert "before the first step in memory" in late.explanation
        assert "not in memory" in late.text
        assert "missing" not in late.explanation
