"""One table makes keys, footer, help and palette; `readonly` removes what changes the engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from textual.command import CommandList

from stepscope.tui.app.app import Dashboard
from stepscope.tui.screens.start import StartApp
from stepscope.tui.settings.action_table import GROUPS, PAGES, Need, Page, Place
from stepscope.tui.settings.actions import ACTIONS, BY_ID, Abilities, footer_entries
from stepscope.tui.views.lines import spot_of
from stepscope.tui.views.panels import footer
from tests.support.screens import still_dashboard
from tests.support.screens.palette import offered_in_palette
from tests.support.screens.screen_text import help_lines, line_texts, screen_text
from tests.support.waiting import until

EVERYTHING = Abilities(has=frozenset({"engine", "recorder", "live", "files"}))


dashboard = partial(still_dashboard.dashboard, control_endpoint="ipc:///nobody/here")


def start_app() -> StartApp:
    return StartApp(lambda choice: None, lambda: None, any_terminal=True)  # type: ignore[arg-type,return-value]


def test_every_action_has_its_own_id_and_keys() -> None:
    assert len(BY_ID) == len(ACTIONS)
    keys = [key for action in ACTIONS for key in action.keys]
    assert len(keys) == len(set(keys))
    assert {action.group for action in ACTIONS} == set(GROUPS)


def test_actions_that_change_the_engine_or_write_a_file_have_upper_case_keys() -> None:
    for action in ACTIONS:
        if action.group == "act":
            assert all(key.isupper() for key in action.keys), action.id
        if action.changes_engine:
            assert action.group == "act"


async def test_every_action_has_a_handler_and_its_keys(still_source: Callable[..., Any]) -> None:
    app = dashboard(still_source())
    async with app.run_test(size=(120, 40)):
        here = set(app.main.handlers.by_action)
        there = set(start_app().handlers)
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


async def test_in_readonly_mode_actions_that_change_the_engine_are_hidden_and_disabled(
    still_source: Callable[..., Any],
) -> None:
    app = dashboard(still_source(), readonly=True)
    async with app.run_test(size=(200, 60)) as pilot:
        abilities = app.session.abilities
        offered = {action_id for action_id, _, _ in footer_entries(abilities)}
        text = "\n".join(line_texts(help_lines(abilities)))
        await pilot.press("ctrl+p")
        palette = await offered_in_palette(app)
        await pilot.press("escape")
        changing = [action for action in ACTIONS if action.changes_engine]
        assert {action.id for action in changing} >= {"budget", "knobs", "undo", "pause_engine"}
        for action in changing:
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


async def test_the_reason_for_a_refused_key_disappears_with_the_screen_or_after_seconds(
    still_source: Callable[..., Any],
) -> None:
    now_s = 0.0
    source = still_source()
    app = Dashboard(
        source,
        source.history,
        any_terminal=True,
        fps=1.0,
        clock=lambda: now_s,
        control_endpoint="ipc:///nobody/here",
        readonly=True,
    )
    refused = "this dashboard is --readonly"
    async with app.run_test(size=(120, 40)) as pilot:

        def notice() -> list[str]:
            return app.main.canvas.text_of("notice")

        await pilot.press("K")
        assert refused in notice()[0]
        await pilot.press("2")
        assert refused not in notice()[0]
        await pilot.press("K")
        now_s += 4.0
        app.main.draw_if_changed()
        assert refused in notice()[0]
        now_s += 2.0
        app.main.draw_if_changed()
        assert refused not in notice()[0]
        app.main.notices.say("what went wrong", "breach")  # that stays
        await pilot.press("1")
        assert "what went wrong" in notice()[0]


async def test_the_palette_runs_actions(still_source: Callable[..., Any]) -> None:
    app = dashboard(still_source())
    async with app.run_test(size=(120, 40)) as pilot:
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


@pytest.mark.parametrize(
    ("page", "has", "action_id", "said"),
    [
        ("live", {"live"}, "live", "the newest step, and follow it"),
        ("live", {"replay"}, "live", "the end of the file"),
        ("knobs", {"replay"}, "oldest", "the first step of the file"),
        ("compare", {"replay"}, "live", "the last column"),
        ("compare", {"live"}, "live", "the last column"),
        ("start", set(), "live", "the last line"),
        ("live", {"live"}, "inspect", "with none selected the step at the cursor"),
        ("fleet", {"live"}, "inspect", "the screens of the chosen engine"),
        ("fleet", {"live", "recorder", "files"}, "record", "a recording of the chosen engine"),
        ("live", {"live", "recorder", "files"}, "record", "start or end a recording"),
        ("kv", {"live"}, "sort", "blocks by state, owner or kind of layer"),
    ],
)
def test_help_and_palette_describe_a_key_as_it_works_on_the_current_screen(
    page: Place, has: set[Need], action_id: str, said: str
) -> None:
    abilities = Abilities(has=frozenset(has))
    (action,) = (each for each in abilities.on(page) if each.id == action_id)
    assert said in action.help
    (line,) = (
        "".join(text for text, _ in line)
        for line in help_lines(abilities, page)
        if line and len(line) > 1 and line[1][0] == action.shown
    )
    assert line.endswith(action.help)
    others = [text for where, text in action.elsewhere if text != action.help]
    text = "\n".join(line_texts(help_lines(abilities, page)))
    assert not [each for each in others if each in text and each not in action.help]


@pytest.mark.parametrize(
    ("page", "action_id", "said"),
    [
        ("step", "axis", "t does nothing here; 1 is the main screen"),
        ("fleet", "axis", "1 is the main screen of the chosen engine, Enter opens it"),
        ("compare", "reverse", "i does nothing here; it is for latencies (5)"),
        ("compare", "worst", "w does nothing here; 1 is the main screen"),
        ("live", "other_side", "s does nothing here; it is for two runs (7)"),
    ],
)
def test_a_key_without_effect_on_a_screen_names_a_screen_where_it_works(
    page: Page, action_id: str, said: str
) -> None:
    assert EVERYTHING.where_else(BY_ID[action_id], page).endswith(said)


@pytest.mark.parametrize("page", PAGES)
def test_help_explains_the_glyphs_of_the_current_screen(page: Page) -> None:
    text = "\n".join(line_texts(help_lines(EVERYTHING, page)))
    assert ("KV blocks: shared" in text) == (page in ("live", "kv"))
    assert ("your mark" in text) == (page == "live")


@pytest.mark.parametrize(
    ("page", "has", "label"),
    [("live", {"live"}, "Live"), ("live", {"replay"}, "End"), ("compare", {"live"}, "End")],
)
def test_the_footer_says_where_the_live_key_goes_on_each_screen(
    page: Page, has: set[Need], label: str
) -> None:
    line = footer.draw(Abilities(has=frozenset(has)), True, 300, page)[0]
    assert f" L {label} " in "".join(text for text, _ in line)
