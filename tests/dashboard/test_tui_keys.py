"""Keys and mouse: time travel, lanes, marks, pictures, while steps keep arriving."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.wire import EngineStatus, StepRecord
from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.terminal import logged_to_file, see_log
from tests.support.screens.clicks import click
from tests.support.screens.running import running
from tests.support.screens.screen_text import screen_text
from tests.support.screens.still_dashboard import dashboard

NUM_STEPS = 400


def append_step(source: Any) -> int:
    """Append one more step, as the source's thread would."""
    history = source.history
    last = history.record(history.last_step)
    counts = ("num_prefill_tokens", "num_decode_tokens", "num_running", "num_waiting")
    step = StepRecord(
        step=last.step + 1,
        schedule_start_ns=last.tokens_ns,
        tokens_ns=last.tokens_ns + 12_000_000,
        batch=[],
        **dict.fromkeys(counts, 0),
    )
    history.append(history.last_sequence + 1, step)
    return step.step


async def test_pausing_the_dashboard_freezes_the_picture_while_steps_arrive(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("space")
        columns = app.main.frame.columns
        before = screen_text(app).splitlines()[2:30]
        for _ in range(30):
            append_step(source)
        app.main.draw()
        await pilot.pause()
        after = screen_text(app).splitlines()
        assert after[2:30] == before
        assert "PAUSED" in after[0]
        assert "back (30 steps)" in after[0]
        await pilot.press("left", "left", "left")  # among the shown steps
        assert app.main.frame.columns == columns
        assert app.main.frame.cursor_column == len(columns) - 4
        await pilot.press("L")
        assert "▐LIVE▌" in screen_text(app)
        assert f"step {NUM_STEPS + 29}" in screen_text(app)


@pytest.mark.parametrize(
    ("keys", "step"),
    [
        (["left"], 398),
        (["h", "h", "l"], 398),
        (["shift+left"], 389),
        (["shift+left", "shift+right", "left"], 398),
        (["home"], 0),
        (["home", "right", "right"], 2),
        (["home", "left"], 0),
        (["x", "left"], 397),  # a column of two steps
        (["x", "x", "shift+left"], 349),
    ],
)
async def test_keys_move_the_cursor_through_time(source: Any, keys: list[str], step: int) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press(*keys)
        assert app.main.view.cursor == step
        frame = app.main.frame
        assert frame.cursor == step
        assert frame.state.step == step
        assert frame.cursor_column is not None


async def test_paging_through_time_reaches_every_step(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        seen = set()
        for _ in range(8):
            await pilot.press("pageup")
            seen |= {c.first for c in app.main.frame.columns if c is not None}
        assert app.main.view.cursor == 0
        assert seen >= set(range(NUM_STEPS - 104))
        await pilot.press("pagedown")
        assert app.main.view.cursor > 90


async def test_keys_find_the_previous_and_next_event_and_preemption(source: Any) -> None:
    history = source.history
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("left_curly_bracket")
        step = app.main.view.cursor
        assert history.summary(step).num_preempted
        assert "preempt r" in screen_text(app)
        await pilot.press("left_curly_bracket")
        assert app.main.view.cursor < step
        await pilot.press("right_curly_bracket")
        assert app.main.view.cursor == step
        await pilot.press("L")
        found = [NUM_STEPS]
        for _ in range(3):
            await pilot.press("left_square_bracket")
            assert app.main.view.cursor < found[-1]
            found.append(app.main.view.cursor)
        await pilot.press("right_square_bracket")
        assert app.main.view.cursor == found[-2]
        await pilot.press("home", "left_curly_bracket")
        assert "no preemption before step 0" in screen_text(app)


@pytest.mark.parametrize(
    ("text", "step"), [("123", 123), ("1,23", 123), ("99999", 399), ("-1s", 329)]
)
async def test_the_goto_prompt_accepts_steps_and_times(source: Any, text: str, step: int) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("g", *"soon", "enter")
        assert "not a step, a time or a distance in time" in screen_text(app)
        await pilot.press("ctrl+u", *text, "enter")
        assert app.screen is app.main
        assert app.main.view.cursor == step
        await pilot.press("L")
        assert "▐LIVE▌" in screen_text(app)


async def test_a_selected_lane_stays_selected_as_the_cursor_moves_through_time(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("down", "down")
        frame = app.main.frame
        request_id = frame.lanes[1].request_id
        assert app.main.view.selected == request_id
        assert f"▶r{request_id} " in screen_text(app)
        await pilot.press("comma")
        step = app.main.view.cursor
        rows = source.history.record(step).batch
        assert request_id in {row.request_id for row in rows}
        assert re.search(rf"r{request_id}: decode of 1 token\b", screen_text(app))
        await pilot.press("escape")
        assert app.main.view.selected is None


async def test_scrolling_shows_lanes_that_did_not_fit(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        seen = {row.request_id for row in app.main.frame.lanes}
        for key in ("up", "down"):
            await pilot.press(key, key)  # the first selects
            for _ in range(app.main.frame.num_lanes):
                app.main.action_do(f"lane_{key}")
                seen |= {row.request_id for row in app.main.frame.lanes}
        assert len(seen) == app.main.frame.num_lanes


async def test_lanes_can_be_filtered_and_sorted_by_keys(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("slash", *"state:wait", "enter")
        assert {row.status for row in app.main.frame.lanes} == {"WAIT"}
        assert "filter: state:wait" in screen_text(app)
        await pilot.press("slash", *["backspace"] * 10, *"!(", "enter")
        assert "missing ), unterminated subpattern" in screen_text(app)
        await pilot.press("ctrl+u", *"state:on", "enter")
        assert "no state 'on'; there are out, pre, dec, wait, end" in screen_text(app)
        await pilot.press("ctrl+u", "enter", "o")
        assert app.main.view.filter == ""
        assert "sort: state" in screen_text(app)


async def test_a_mark_is_set_at_the_cursor_and_found_again(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("shift+left", "M", *"odd", "enter")
        mark = source.history.marks[-1]
        assert (mark.step, mark.text) == (389, "odd")
        await pilot.press("L", "apostrophe")
        assert app.main.view.cursor == 389
        assert "mark: odd" in screen_text(app)


async def test_keys_change_the_frame_rate_which_is_lower_over_ssh(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("plus", "plus", "minus")
        assert app.main.fps == 2.0
        await pilot.press(*["minus"] * 5)
        assert " 1fps" in screen_text(app)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert Dashboard(source).main.fps == 10.0
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6.7.8.9 22")
    assert Dashboard(source).main.fps == 5.0


async def test_a_click_sets_the_cursor_and_the_scrub_bar_is_dragged(source: Any) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await click(pilot, "chart", (50, 3))
        column = app.main.frame.columns[50 - 1 - app.main.canvas.label_width]
        assert app.main.view.cursor == column.last
        await click(pilot, "lanes", (60, 2))
        assert app.main.view.selected == app.main.frame.lanes[1].request_id
        await click(pilot, "scrub", (20, 0))
        assert 0 < app.main.view.cursor < 100
        await click(pilot, "footer", (2, 0))
        assert app.main.view.live


async def test_a_drawing_error_is_shown_and_the_dashboard_keeps_running(
    source: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(dashboard(source)) as (app, pilot):
        with monkeypatch.context() as broken:
            broken.setattr(source.history, "state_at", lambda step: 1 / 0)
            await pilot.press("left")
            assert "drawing failed" in screen_text(app)
            assert "ZeroDivisionError" in screen_text(app)
            assert any("drawing failed" in record.message for record in caplog.records)
        await pilot.press("left")
        assert "drawing failed" not in screen_text(app)
        assert "PAUSED" in screen_text(app)


async def test_rarely_drawn_views_show_the_last_step_soon_if_none_follows(source: Any) -> None:
    now = [0.0]
    app = Dashboard(source, any_terminal=True, fps=0.5, clock=lambda: now[0])
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        now[0] = 10.0
        app.main.draw_if_changed()
        step = append_step(source)
        now[0] = 10.1  # too soon for the slow views
        app.main.draw_if_changed()
        now[0] = 10.8
        app.main.draw_if_changed()
        assert f"step {step}" in app.main.canvas.text_of("page")[0]


@pytest.mark.parametrize("status", ["down", "stale", "paused"])
async def test_at_an_earlier_step_the_header_says_what_the_engine_does(
    source: Any, status: str
) -> None:
    app, history = dashboard(source), source.history
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("left", "left")
        if status == "paused":
            now = EngineStatus(
                time_ns=history.state.time_ns, state=status, step=399, num_running=3, num_waiting=0
            )
            history.append(history.last_sequence + 1, now)
        else:
            source.status, source.error = status, "no engine answers at ipc:///gone"
        app.main.draw_if_changed()
        assert f"engine {status} by now" in screen_text(app)
        assert "step 397" in screen_text(app)
        await pilot.press("L")
        assert "by now" not in screen_text(app)
        assert ("no engine answers at ipc:///gone" in screen_text(app)) == (status != "paused")
        badge = "LIVE engine paused" if status == "paused" else status.upper()
        assert f"▐{badge}▌" in screen_text(app)


def test_errors_go_to_the_log_file_and_not_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log" / "dashboard.log"
    logger = logging.getLogger("stepscope.tui")
    with logged_to_file(path):
        assert not path.exists()
        logger.error("a thread died")
        assert see_log(ValueError(7)) == f"see {path}: ValueError(7)"
        monkeypatch.setenv("HOME", str(tmp_path))
        assert see_log(ValueError(7)) == "see ~/log/dashboard.log: ValueError(7)"
    assert see_log(ValueError(7)) == "see the log: ValueError(7)"
    assert "ERROR stepscope.tui: a thread died" in path.read_text("utf-8")
    with logged_to_file(path / "no folder"):
        logger.error("nobody hears it")
    assert capfd.readouterr().err == ""
