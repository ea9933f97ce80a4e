"""Everything that looks like a row, a column or a key can be clicked, and the wheel scrolls."""

from functools import partial
from typing import Any

import pytest
from textual import events

from stepscope.tui.app.app import Dashboard
from stepscope.tui.settings.action_table import PAGES, Page
from stepscope.tui.views.lines import spot_of
from stepscope.tui.views.pages.page_views import targets
from tests.support.screens import still_dashboard
from tests.support.screens.clicks import click
from tests.support.screens.running import running
from tests.support.screens.screen_text import screen_text

ROWS: list[Page] = ["step", "request", "kv", "latency", "knobs"]


dashboard = partial(still_dashboard.dashboard, control_endpoint="ipc:///nobody/here")


def place_of(app: Dashboard, view: str, kind: str, value: object) -> tuple[int, int]:
    """The position of a clickable spot in a view."""
    canvas = app.main.canvas
    place = canvas.places[view]
    for y in range(place.height):
        for x in range(place.width):
            if spot_of(canvas.content(view, y), x) == (kind, str(value)):
                return x + 3, y
    raise AssertionError(f"{kind} {value} is not on {view}")


@pytest.mark.parametrize("page", ROWS)
async def test_wheel_and_click_select_a_row_and_a_second_opens_it(source: Any, page: Page) -> None:
    async with running(dashboard(source), (160, 50)) as (app, pilot):
        await pilot.press(str(PAGES.index(page) + 1))
        # The wheel goes through the rows, with shift through time.
        await pilot._post_mouse_events([events.MouseScrollDown], offset=(5, 9))
        await pilot.pause()
        assert app.main.view.row == 1
        await pilot._post_mouse_events([events.MouseScrollUp], offset=(5, 9), shift=True)
        await pilot.pause()
        assert app.main.view.cursor == 396
        await pilot.press("L")

        target = targets(app.main.frame)[2]
        at = place_of(app, "page", "row", 2)
        await click(pilot, "page", at)
        assert (app.main.view.page, app.main.view.row) == (page, 2)
        line = screen_text(app).splitlines()[app.main.canvas.places["page"].y + at[1]]
        assert "▶" in line
        await click(pilot, "page", at, times=2)
        if page == "knobs":
            assert "knobs of the engine" in screen_text(app)
        elif page in ("step", "kv"):
            assert (app.main.view.page, app.main.view.selected) == ("request", target.request_id)
        else:
            assert (app.main.view.page, app.main.view.cursor) == ("step", target.step)


async def test_clicks_on_latencies_events_the_badge_the_verdict_and_screens(source: Any) -> None:
    app = dashboard(source)
    view = app.main.view
    async with app.run_test(size=(200, 60)) as pilot:
        for step in (app.main.frame.events[-1].step, app.main.frame.stall.step):
            panel = "latency" if step == app.main.frame.stall.step else "events"
            await click(pilot, panel, place_of(app, panel, "step", step))
            assert view.cursor == step
            await pilot.press("L")
        await click(pilot, "header", (screen_text(app).index("LIVE"), 0))
        assert not view.live
        await click(pilot, "header", (screen_text(app).index("PAUSED"), 0))
        assert view.live
        await click(pilot, "latency", place_of(app, "latency", "latency", "ttft"))
        assert (view.page, view.latency) == ("latency", "ttft")
        await click(pilot, "page", place_of(app, "page", "latency", "tpot"))
        assert view.latency == "tpot"
        assert "TPOT × time" in screen_text(app)
        for name in ("Latency", "KV", "Live"):
            line = screen_text(app).splitlines()[-2]
            await click(pilot, "notice", (line.index(name), 0))
            assert f" {name}]" in screen_text(app).splitlines()[-2]
        await click(pilot, "verdict", (5, 0))
        assert view.page == "step"  # the queue's evidence


async def test_clicking_a_panel_opens_its_screen_and_a_knob_its_editor(source: Any) -> None:
    async with running(dashboard(source), (200, 60)) as (app, pilot):
        for panel, page in (("kv", "kv"), ("inspector", "step")):
            await click(pilot, panel, (10, 4), times=2)
            assert app.main.view.page == page, panel
            await pilot.press("1")
        await click(pilot, "knobs", place_of(app, "knobs", "knob", "policy"), times=2)
        assert "▶ policy" in screen_text(app)
        # The editor: another row, then that row again to change it.
        await pilot.click("#overlay", offset=(5, 2))
        assert "▶ max_num_seqs" in screen_text(app)
        await pilot.click("#overlay", offset=(5, 2))
        assert "Enter applies" in screen_text(app)
        await pilot.click(offset=(1, 1))  # beside it
        assert app.screen is app.main


async def test_a_click_right_after_an_overlay_closes_does_not_end_the_app(source: Any) -> None:
    """As on a slow connection: the second click is on its way when the first closes the overlay."""
    async with running(dashboard(source)) as (app, pilot):
        for kind in (events.Click, events.MouseScrollDown):
            await pilot.press("question_mark")
            overlay = app.screen
            assert overlay is not app.main
            box = overlay.query_one("#overlay")
            at = dict.fromkeys(("x", "y", "delta_x", "delta_y", "button"), 1)
            for each in (events.Click, kind):
                overlay.post_message(each(box, **at, shift=False, meta=False, ctrl=False))
            await pilot.pause()
            assert app.screen is app.main
            assert app.return_code is None
        assert "requests × steps" in screen_text(app)


@pytest.mark.parametrize("page", ["live", "latency"])
async def test_clicking_a_footer_entry_does_what_its_key_does(source: Any, page: Page) -> None:
    async with running(dashboard(source), (200, 60)) as (app, pilot):
        await pilot.press(str(PAGES.index(page) + 1))
        done: list[str] = []
        app.main.action_do = done.append
        line = screen_text(app).splitlines()[-1]
        for word in ("Pause", "Step", "Find event", "Inspect", "Help", "Palette", "Record"):
            await click(pilot, "footer", (line.index(f" {word} ") + 1, 0))
        actions = "pause step_back previous_event inspect help palette record"
        assert " ".join(done) == actions
