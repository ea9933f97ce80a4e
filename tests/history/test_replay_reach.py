"""Keys of a replay reach the whole file, not only what has been played."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Mark, StepRecord
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.panels import header, session_events
from stepscope.tui.views.view import View
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.screens.screen_text import main_text
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.replayed import replayed
from tests.support.sessions.seek_sessions import record
from tests.support.waiting import until

MARKED, CHANGED = 700, (300, 900)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    messages = []
    budgets = zip(CHANGED, (128, 256), strict=True)
    changes = {step: {"max_num_batched_tokens": budget} for step, budget in budgets}
    knobs = Knobs(max_num_batched_tokens=512)
    for sequence, message in simulate(seed=5, num_steps=1200, knobs=knobs, changes=changes):
        messages.append((sequence, message))
        if isinstance(message, StepRecord) and message.step == MARKED:
            mark = Mark(step=MARKED, time_ns=message.tokens_ns, text="here it froze", who="me")
            messages.append((sequence, mark))
    return record(tmp_path_factory.mktemp("reach") / "session.mcap", messages)


@pytest.fixture
def source(file: Path) -> Iterator[ReplaySource]:
    with replayed(file) as replay:
        assert replay.file_index.wait()
        yield replay


async def test_marks_and_changes_ahead_are_drawn_and_reached_by_keys(source: ReplaySource) -> None:
    app = Dashboard(source, any_terminal=True, fps=20.0)
    last = source.recording.last_step
    async with app.run_test(size=(120, 40)) as pilot:

        async def at(key: str, step: int) -> None:
            await pilot.press(key)
            await until(lambda: app.main.new_frame().cursor == step, f"{key}: not at {step}")

        frame = app.main.new_frame()
        assert (frame.cursor, frame.history.num_steps) == (0, 1)
        bar = "".join(text for text, _ in session_events.scrub_bar(frame, 120, 1, 0)[0])
        assert bar.count("◆") == 2
        assert bar.count("▼") == 1
        cursor = 0
        while cursor < CHANGED[0]:  # memory is searched first, and more steps may arrive meanwhile
            before = cursor
            await pilot.press("right_square_bracket")
            await until(
                lambda b=before: app.main.new_frame().cursor > b and not source.is_seeking,
                "no event after it",
            )
            cursor = app.main.new_frame().cursor
        assert cursor == CHANGED[0]
        app.main.navigator.go(last)
        await until(lambda: app.main.new_frame().cursor == last, "not at the end")
        await at("apostrophe", MARKED)
        await until(lambda: "here it froze" in main_text(app), "the mark is not drawn")
        await at("apostrophe", MARKED)  # no earlier mark: stays at the last one
        await at("L", last)
        app.main.navigator.move(-100)  # in memory already: only the picture moves
        assert app.main.view.cursor == last - 100
        app.main.draw()
        assert "▐REPLAY PAUSED▌" in main_text(app)
        assert re.search(r"▐REPLAY PAUSED▌ 00:1\d of 00:12 ", main_text(app))
        assert "in memory" in main_text(app)
        assert "behind" not in main_text(app)
        await at("home", 0)
        await pilot.press("6")
        await until(lambda: "; 2 ahead (])" in main_text(app), "no changes ahead")
        await pilot.press("1")
        await pilot.press("left_curly_bracket")
        await until(lambda: "no preemption before step 0, the first" in main_text(app), "silence")


async def test_going_to_a_time_searches_the_whole_file(source: ReplaySource) -> None:
    app = Dashboard(source, any_terminal=True, fps=20.0)
    async with app.run_test(size=(120, 40)):
        navigator = app.main.navigator

        app.main.new_frame()
        begin_ns = source.history.wall_ns(source.history.summary(0).tokens_ns)
        step = source.step_in(0, 3_000_000_000)
        navigator.goto("+3s")
        await until(lambda: app.main.new_frame().cursor == step, "not three seconds on")
        summary = source.history.summary(step)
        after = source.history.wall_ns(summary.tokens_ns) - begin_ns
        assert after <= 3_000_000_000
        navigator.goto("-3s")
        await until(lambda: app.main.new_frame().cursor == 0, "not back")
        wall_ns = (begin_ns // 10**9 + 5) * 10**9
        navigator.goto(fmt.clock(wall_ns))
        wanted = source.step_in(0, wall_ns - begin_ns)
        await until(lambda: app.main.new_frame().cursor == wanted, "not at that time")
        start, end = (fmt.moment(each) for each in source.extent_ns)
        outside = fmt.clock(source.extent_ns[1] + 60 * 10**9)
        with pytest.raises(ValueError, match=f"^not in the file, which is of {start} to {end}$"):
            navigator.target(outside)
        navigator.goto("999999")
        last = source.recording.last_step
        await until(lambda: app.main.new_frame().cursor == last, "not at the end")
        app.main.draw()
        assert f"the last step of the file is {last:,}" in main_text(app)


def test_an_idle_minute_is_not_shown_as_missing_data() -> None:
    """A memory that begins before an idle minute misses nothing; one that begins after it does."""
    rare = SimulatedWorkload(rate=0.01, document_share=0.0, output_tokens=90)
    messages = simulate(seed=5, num_steps=900, workload=rare)
    steps = [message for _, message in messages if isinstance(message, StepRecord)]
    pairs = [(a, b) for a, b in pairwise(steps) if b.schedule_start_ns - a.tokens_ns > 61 * 10**9]
    before, after = pairs[1]
    whole = history_of(messages)

    def key_figures_from(step: int) -> str:
        history = History()
        history.begin(whole.state_at(step), 0)
        for sequence, message in messages:
            if isinstance(message, StepRecord) and step < message.step <= after.step + 40:
                history.append(sequence, message)
        frame = FrameBuilder(history, (0, 899)).build(View(), 80, 20, 20)
        return "".join(text for line in header.key_figures(frame, 200, 1, 0) for text, _ in line)

    said = key_figures_from(before.step)
    assert "TTFT p95 " in said
    assert "PREEMPT 0/m" in said
    assert re.search(r"TTFT p95/[\d.]+s .+PREEMPT 0/[\d.]+s", key_figures_from(after.step + 9))
