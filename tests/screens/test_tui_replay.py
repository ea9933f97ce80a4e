"""A replay is the same dashboard: it plays, pauses, steps and seeks in a file."""

import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual import events
from textual._compositor import CompositorUpdate
from textual.screen import Screen

import stepscope.recordings.samples
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.preferences import Preferences
from stepscope.tui.views.charts import scrub_bar
from stepscope.tui.views.notices import Notices
from tests.support.screens.clicks import click
from tests.support.screens.screen_text import main_text
from tests.support.waiting import until

SAMPLE = Path(stepscope.recordings.samples.__file__).parent / "freeze.mcap"


@pytest.fixture
def source() -> Iterator[ReplaySource]:
    """A replay at its first step."""
    replay = ReplaySource(Recording(SAMPLE), playing=False)
    replay.start()
    assert replay.wait()
    yield replay
    replay.stop()


def dashboard(source: ReplaySource) -> Dashboard:
    return Dashboard(source, source.history, any_terminal=True, fps=20.0)


async def test_a_replay_offers_speed_keys_but_none_that_need_an_engine(
    source: ReplaySource,
) -> None:
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


async def test_keys_change_the_replay_speed(source: ReplaySource) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("greater_than_sign", "greater_than_sign", "less_than_sign")
        assert source.speed == 2.0
        await until(lambda: "▐REPLAY 2x▌" in main_text(app), "the badge does not say so")


async def test_steps_outside_memory_are_read_from_the_file(
    source: ReplaySource,
) -> None:
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


async def test_any_step_of_the_file_can_be_reached_by_number_and_scrub_bar(
    source: ReplaySource,
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("g", *"250", "enter")
        await until(lambda: source.history.last_step == 250, "it does not get there")
        await until(lambda: "step 250 " in main_text(app), "it is not shown")
        frame = app.main.frame
        assert frame.extent == (source.recording.first_step, source.recording.last_step)
        x = next(x for x in range(120) if (scrub_bar.step_at(frame, x, 120) or 0) >= 100)
        await click(pilot, "scrub", (x, 0))
        await until(lambda: app.main.new_frame().cursor in (100, 101, 102), "no jump")
        await pilot.press("home")
        await until(
            lambda: app.main.new_frame().cursor == source.recording.first_step, "not at the start"
        )


class Written:
    """The screen of a terminal that receives what a dashboard writes."""

    def __init__(self, app: Dashboard, width: int, height: int) -> None:
        self._app = app
        self._cells = [[" "] * width for _ in range(height)]

    def display(self, screen: Screen[object], update: object) -> None:
        if isinstance(update, CompositorUpdate) and self._app.is_running:
            x = y = 0
            for told, text in _PIECES.findall(update.render_segments(self._app.console)):
                if told.endswith("H"):
                    y, x = (int(part) - 1 for part in told[2:-1].split(";"))
                for cell in text:
                    if cell == "\n":
                        x, y = 0, y + 1
                        continue
                    self._cells[y][x] = cell
                    x += 1

    @property
    def text(self) -> str:
        return "\n".join("".join(row) for row in self._cells)


_PIECES = re.compile("(\\x1b\\[[0-9;]*[A-Za-z])|([^\\x1b]+)")


@pytest.mark.parametrize("waits_s", [0.0, 0.05, 0.3])
async def test_the_prompt_line_has_disappeared_when_the_sought_step_is_shown(
    source: ReplaySource, monkeypatch: pytest.MonkeyPatch, waits_s: float
) -> None:
    """Also if a slow seek shows the old picture once more."""
    app = dashboard(source)
    written = Written(app, 120, 40)
    monkeypatch.setattr(app, "_display", written.display)
    go_to = ReplaySource._go_to

    def slowly(replay: ReplaySource, step: int) -> None:
        time.sleep(waits_s)
        go_to(replay, step)

    monkeypatch.setattr(ReplaySource, "_go_to", slowly)
    async with app.run_test(size=(120, 40)) as pilot:
        for step in (250, 40, 333):
            await pilot.press("g", *str(step))
            await until(lambda step=step: f"{step}_" in written.text, "no prompt")
            await pilot.press("enter")
            await until(lambda step=step: f"step {step} " in written.text, "it is not shown")
            await until(lambda: written.text == main_text(app), "the screen is not what it was")
            assert "go to a step" not in written.text


async def test_the_end_of_a_replay_is_announced_and_space_starts_again(
    source: ReplaySource,
) -> None:
    source.seek(source.recording.last_step)
    assert source.wait()
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("space")
        await until(lambda: source.status == "ended", "it does not end")
        await until(lambda: "▐REPLAY END▌" in main_text(app), "the end is not said")
        await pilot.press("space")
        await until(lambda: source.history.last_step < 100, "it does not begin again")


async def test_a_key_that_needs_an_engine_says_so_in_a_replay(source: ReplaySource) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("B")
        await until(lambda: "B needs a live engine" in main_text(app), "silence")


async def test_keys_typed_in_one_burst_reach_the_input_line_that_the_first_key_opens(
    source: ReplaySource,
) -> None:
    app = dashboard(source)
    async with app.run_test(size=(120, 40)):
        for key in ("g", "7", "enter"):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
        await until(lambda: app.main.view.cursor == 7 or source.history.last_step == 7, "not there")


def test_a_notice_about_a_step_disappears_on_leaving_it_and_others_stay() -> None:
    notices = Notices(lambda: 0.0)
    notices.say_of_place("no preemption after step 7,745", "caution")
    assert notices.line([], 80)
    notices.leave_place()
    assert not notices.line([], 80)
    notices.say("recording to x.mcap")
    notices.leave_place()
    assert notices.line([], 80)


async def test_view_and_service_levels_of_a_replay_are_not_saved_in_the_config_file(
    source: ReplaySource, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    names = ("axis", "sort", "slo_ttft_ms", "slo_itl_ms", "theme")
    preferences = Preferences(path, dict.fromkeys(names))
    app = Dashboard(source, source.history, any_terminal=True, fps=20.0, preferences=preferences)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("t", "o", "b", *"ttft=2s itl=12", "enter")
        assert "ITL within 12 ms, for this session only" in main_text(app)
        assert source.history.slo.itl_ms == 12.0
        app.main.session.prefer("theme", "light")  # of the terminal, not of the recording
    app.close()
    assert tomllib.loads(path.read_text())["dashboard"] == {"theme": "light"}
