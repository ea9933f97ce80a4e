"""A replay is the same dashboard: it plays, pauses, steps and seeks in a file."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual import events

from stepscope.recordings import samples
from stepscope.recordings.history.history import History
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.latency import SLO
from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.views.charts import budget_chart, kv_map, lanes
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages import knobs_page
from stepscope.tui.views.pages.page_views import PAGE_VIEWS
from stepscope.tui.views.panels import header, inspector, latency_panel, session_events
from stepscope.tui.views.view import View
from tests.support.screens.clicks import click
from tests.support.screens.running import running
from tests.support.screens.screen_text import line_texts, main_text
from tests.support.sessions.received import busy_messages
from tests.support.sessions.replayed import replayed, seek
from tests.support.waiting import until


@pytest.fixture
def source() -> Iterator[ReplaySource]:
    with replayed(samples.shipped()["freeze"]) as source:
        yield source


def dashboard(source: ReplaySource) -> Dashboard:
    return Dashboard(source, any_terminal=True, fps=20.0)


async def test_a_replay_offers_speed_keys_but_none_for_an_engine(source: ReplaySource) -> None:
    offered = {action.id for action in dashboard(source).session.abilities.available()}
    assert {"slower", "faster", "pause", "goto", "screenshot"} <= offered
    assert not offered & {"budget", "knobs", "undo", "pause_engine", "step_engine", "record"}


async def test_space_plays_and_pauses_a_replay(source: ReplaySource) -> None:
    app = dashboard(source)
    first = source.recording.first_step
    async with app.run_test(size=(120, 40)) as pilot:
        assert "▐REPLAY PAUSED▌" in main_text(app)
        assert "LIVE" not in main_text(app)
        await pilot.press("space")
        await until(lambda: source.history.last_step > first + 5, "it does not play")
        await until(lambda: "▐REPLAY 1x▌" in main_text(app), "the badge does not say so")
        await pilot.press("space")
        assert source.status == "paused"
        await pilot.press("greater_than_sign", "greater_than_sign", "less_than_sign")
        assert source.speed == 2.0


async def test_steps_outside_memory_are_read_from_the_file(source: ReplaySource) -> None:
    app = dashboard(source)
    first = source.recording.first_step
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("right")
        await until(lambda: source.history.last_step == first + 1, "no step on")
        await pilot.press("shift+right")
        await until(lambda: source.history.last_step == first + 11, "no ten steps on")
        await pilot.press("left", "left")
        assert app.main.view.cursor == first + 9
        assert source.history.last_step == first + 11


async def test_any_step_of_the_file_is_reached_by_number_and_scrub_bar(
    source: ReplaySource,
) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("g", *"250", "enter")
        await until(lambda: source.history.last_step == 250, "it does not get there")
        await until(lambda: "step 250 " in main_text(app), "it is not shown")
        frame = app.main.frame
        assert frame.extent == (source.recording.first_step, source.recording.last_step)
        x = next(x for x in range(120) if (session_events.step_at(frame, x, 120) or 0) >= 100)
        await click(pilot, "scrub", (x, 0))
        await until(lambda: app.main.new_frame().cursor in (100, 101, 102), "no jump")
        await pilot.press("home")
        await until(lambda: app.main.new_frame().cursor == frame.extent[0], "not at the start")


async def test_the_end_of_a_replay_is_told_and_space_starts_again(source: ReplaySource) -> None:
    seek(source, source.recording.last_step)
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press("space")
        await until(lambda: source.status == "ended", "it does not end")
        await until(lambda: "▐REPLAY END▌" in main_text(app), "the end is not said")
        await pilot.press("space")
        await until(lambda: source.history.last_step < 100, "it does not begin again")


async def test_keys_in_one_burst_reach_the_input_line_that_the_first_opens(
    source: ReplaySource,
) -> None:
    async with running(dashboard(source)) as (app, _):
        for key in ("g", "7", "enter"):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
        await until(lambda: app.main.view.cursor == 7 or source.history.last_step == 7, "not there")


async def test_view_and_service_levels_of_a_replay_are_not_saved_in_the_config_file(
    source: ReplaySource, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    names = ("axis", "sort", "slo_ttft_ms", "slo_itl_ms", "theme")
    preferences = Preferences(path, dict.fromkeys(names))
    app = Dashboard(source, any_terminal=True, fps=20.0, preferences=preferences)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("t", "o", "b", *"ttft=2s itl=12", "enter")
        assert "ITL within 12 ms, for this session only" in main_text(app)
        assert source.history.slo.itl_ms == 12.0
        app.main.session.prefer("theme", "light")  # of the terminal, not of the recording
    app.close()
    assert tomllib.loads(path.read_text())["dashboard"] == {"theme": "light"}


WIDTH, GUTTER = 140, 14
EXTENT = 0, 399


def screen(history: History, step: int) -> dict[str, list[str]]:
    """Every panel and screen of the dashboard, paused at `step`, as characters."""
    view = View(cursor=step, right=step)
    frame = FrameBuilder(history, clock=lambda: 0.0).build(view, WIDTH - GUTTER - 2, 20, 12)
    panels = {
        "figures": header.key_figures(frame, WIDTH, 2, GUTTER),
        "steps": budget_chart.draw(frame, WIDTH, 12, GUTTER),
        "lanes": lanes.draw(frame, WIDTH, 22, GUTTER),
        "kv": kv_map.draw(frame, WIDTH, 10, GUTTER),
        "latency": latency_panel.draw(frame, 60, 10, GUTTER),
        "step": inspector.draw(frame, 60, 14, GUTTER),
        "knobs": knobs_page.panel(frame, 60, 12, "", False),
        "events": session_events.draw(frame, 60, 14, GUTTER),
    }
    for page, drawing in PAGE_VIEWS.items():
        view = View(cursor=step, right=step, page=page)
        frame = FrameBuilder(history, clock=lambda: 0.0).build(view, 0, 0, 8)
        frame.extent = EXTENT  # a replay also knows the later steps
        panels[page] = drawing.draw(frame, WIDTH, 50)
    return {name: line_texts(lines) for name, lines in panels.items()}


@pytest.fixture(scope="module")
def live_and_file(
    tmp_path_factory: pytest.TempPathFactory, recorded_to: Any
) -> tuple[History, Path]:
    """A busy session as received, and its recording from the first message on."""
    path = tmp_path_factory.mktemp("session") / "session.mcap"
    messages = busy_messages(400, 340)
    with recorded_to(path, SLO(ttft_ms=500.0, itl_ms=30.0)) as source:
        for sequence, message in messages:
            source.take(sequence, message)
    return source.history, path


@pytest.mark.parametrize("step", [1, 57, 200, 341, 399])
def test_every_panel_at_a_step_is_the_same_live_and_replayed(
    live_and_file: tuple[History, Path], step: int
) -> None:
    live, path = live_and_file
    with replayed(path, History(live.slo)) as source:
        seek(source, step)
        found = screen(source.history, step)
    expected = screen(live, step)
    for panel, lines in expected.items():
        assert found[panel] == lines, panel
    assert "━" in "".join(expected["lanes"])


def test_after_a_seek_the_figures_are_of_the_shown_step(
    live_and_file: tuple[History, Path],
) -> None:
    live, path = live_and_file
    stalls = sorted(each.step for each in live.windows.stalls(100).longest)
    with replayed(path, History(live.slo)) as source:
        # No refresh is due by time.
        builder = FrameBuilder(source.history, clock=lambda: 0.0, stands=lambda: True)
        for step in (stalls[-1], stalls[0], stalls[len(stalls) // 2]):
            seek(source, step)
            frame = builder.build(View(), 80, 10, 8)
            assert (frame.cursor, frame.stall.step) == (step, step)
            assert frame.latency.end_ns == frame.state.time_ns
