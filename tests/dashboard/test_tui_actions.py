"""One table makes keys, footer, help and palette; `readonly` removes what changes the engine."""

from functools import partial
from typing import Any

import pytest
from textual.command import CommandList

from stepscope.tui.app.app import Dashboard
from stepscope.tui.screens.start import StartApp
from stepscope.tui.settings.action_table import GROUPS, PAGES, Page
from stepscope.tui.settings.actions import ACTIONS, BY_ID, Abilities, footer_entries
from stepscope.tui.views.lines import spot_of
from stepscope.tui.views.panels import footer
from tests.support.screens import still_dashboard
from tests.support.screens.palette import offered_in_palette
from tests.support.screens.running import running
from tests.support.screens.screen_text import help_lines, line_texts, screen_text
from tests.support.waiting import until

EVERYTHING = Abilities(has=frozenset({"engine", "recorder", "live", "files"}))


dashboard = partial(still_dashboard.dashboard, control_endpoint="ipc:///nobody/here")


def test_every_action_has_its_own_id_and_keys() -> None:
    assert len(BY_ID) == len(ACTIONS)
    keys = [key for action in ACTIONS for key in action.keys]
    assert len(keys) == len(set(keys))
    assert {action.group for action in ACTIONS} == set(GROUPS)
    # What changes the engine or writes a file has upper-case keys.
    assert all(key.isupper() for a in ACTIONS if a.group == "act" for key in a.keys)
    assert {action.group for action in ACTIONS if action.changes_engine} == {"act"}


async def test_every_action_has_a_handler_and_its_keys(still_source: Any) -> None:
    async with running(dashboard(still_source())) as (app, _):
        here = set(app.main.handlers.by_action)
        there = set(StartApp(lambda choice: None, lambda: None, any_terminal=True).handlers)
        assert here == {action.id for action in ACTIONS if not action.pages.isdisjoint(PAGES)}
        assert there == {action.id for action in ACTIONS if "start" in action.pages}
        assert here | there == set(BY_ID)
        bound: dict[str, set[str]] = {}
        for key, binding in app.main._bindings:
            bound.setdefault(binding.id or "", set()).add(key)
        of_screens = [action for action in ACTIONS if not action.pages.isdisjoint(PAGES)]
        assert bound == {action.id: set(action.keys) for action in of_screens}


@pytest.mark.parametrize("width", [1, 40, 80, 120, 200])
@pytest.mark.parametrize("is_ascii", [False, True])
def test_the_footer_fits_and_always_offers_help_and_quit(width: int, is_ascii: bool) -> None:
    abilities = EVERYTHING.written(is_ascii)
    (runs,) = footer.draw(abilities, True, width)
    line = "".join(text for text, _ in runs)
    if width >= 80:
        assert len(line) <= width
        assert "? Help" in line
        assert "q Quit" in line
        assert "B Budget" in line
        assert spot_of(runs, line.index("Help")) == ("do", "help")
        assert spot_of(runs, line.index("Quit")) == ("do", "quit")


async def test_readonly_hides_and_disables_what_changes_the_engine(still_source: Any) -> None:
    async with running(dashboard(still_source(), readonly=True), (200, 60)) as (app, pilot):
        abilities = app.session.abilities
        offered = {action_id for action_id, _, _ in footer_entries(abilities)}
        text = "\n".join(line_texts(help_lines(abilities)))
        await pilot.press("ctrl+p")
        palette = await offered_in_palette(app)
        await pilot.press("escape")
        for action in (action for action in ACTIONS if action.changes_engine):
            assert not abilities.allows(action)
            assert action.id not in offered
            assert action.help not in text
            assert not any(action.help in line for line in palette)
            assert app.main.check_action("do", (action.id,)) is False
            for key in action.keys:
                await pilot.press(key)
            app.main.action_do(action.id)  # also when it is called past the keys
            assert app.screen is app.main, action.id
            assert app.main.operator.pending == "", action.id


async def test_why_a_key_is_refused_disappears_with_the_screen_or_in_time(
    still_source: Any,
) -> None:
    now_s = [0.0]
    source, options = still_source(), {"control_endpoint": "ipc:///nobody/here", "readonly": True}
    app = Dashboard(source, any_terminal=True, clock=lambda: now_s[0], **options)
    async with app.run_test(size=(120, 40)) as pilot:

        def is_refused() -> bool:
            app.main.draw_if_changed()
            return "this dashboard is --readonly" in app.main.canvas.text_of("notice")[0]

        await pilot.press("K")
        assert is_refused()
        await pilot.press("2")
        assert not is_refused()
        await pilot.press("K")
        now_s[0] = 4.0
        assert is_refused()
        now_s[0] = 6.0
        assert not is_refused()
        app.main.notices.say("what went wrong", "breach")  # that stays
        await pilot.press("1")
        assert "what went wrong" in app.main.canvas.text_of("notice")[0]


async def test_the_palette_runs_actions(still_source: Any) -> None:
    async with running(dashboard(still_source())) as (app, pilot):
        await pilot.press("ctrl+p", *"axis")
        assert "columns are steps" in (await offered_in_palette(app))[0]
        await pilot.press("enter")
        await until(lambda: app.main.view.axis == "time", "the axis is not changed")
        await pilot.press("ctrl+p", *"no action has this name")
        await until(lambda: "No matches" in screen_text(app), "it is not said")
        await pilot.press("escape", "ctrl+p", *"zoom")
        assert len(await offered_in_palette(app)) == 2
        await pilot.click(CommandList, offset=(5, 1))  # the second of what was found
        await until(lambda: app.main.view.zoom == 2, "the zoom is not changed")
        assert app.screen is app.main


@pytest.mark.parametrize("page", PAGES)
def test_help_explains_the_glyphs_of_the_current_screen(page: Page) -> None:
    text = "\n".join(line_texts(help_lines(EVERYTHING, page)))
    assert ("KV blocks: shared" in text) == (page in ("live", "kv"))
    assert ("your mark" in text) == (page == "live")
