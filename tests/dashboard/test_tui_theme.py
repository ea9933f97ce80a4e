"""States differ without colour, and every terminal gets the colours and glyphs it can show."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope import tui
from stepscope.recordings.state.series.lanes import Cell
from stepscope.tui.app.app import Dashboard
from stepscope.tui.views.glossary import GLYPHS, TERMS
from stepscope.tui.views.theme import (
    _ASCII,
    KV_GLYPHS,
    KV_LEGEND,
    KV_STYLES,
    LANE_GLYPHS,
    LANE_STYLES,
    LEGEND,
    LEVELS,
    Skin,
    colour_mode,
    styles,
)

SAME_STATE = {  # distinguished by its context, or not meant to be distinguished
    Cell.PREFILL_ALT: Cell.PREFILL,
    Cell.RECOMPUTE: Cell.PREFILL,
    Cell.RECOMPUTE_ALT: Cell.PREFILL,
}


@pytest.mark.parametrize("ascii_only", [False, True])
def test_lane_states_differ_without_colour(ascii_only: bool) -> None:
    skin = Skin("none", ascii_only)
    glyphs = {
        state: skin.text(LANE_GLYPHS[state], LANE_STYLES[LANE_GLYPHS[state]])
        for state in Cell
        if state not in SAME_STATE
    }
    assert len(set(glyphs.values())) == len(glyphs)
    assert all(len(glyph) == 1 for glyph in glyphs.values())
    next_chunk = skin.text(LANE_GLYPHS[Cell.PREFILL_ALT])
    assert next_chunk not in glyphs.values()


@pytest.mark.parametrize("ascii_only", [False, True])
def test_block_states_differ_without_colour(ascii_only: bool) -> None:
    skin = Skin("none", ascii_only)
    glyphs = [skin.text(glyph, style) for glyph, style in zip(KV_GLYPHS, KV_STYLES, strict=True)]
    assert len(set(glyphs)) == 4


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_legend_explains_every_glyph_once(ascii_only: bool) -> None:
    skin = Skin("none", ascii_only)
    shown = [skin.text(glyph, style) for glyph, style, _ in LEGEND]
    assert len(set(shown)) == len(shown)
    assert set(LANE_GLYPHS) - {" ", "▒"} <= {glyph for glyph, _, _ in LEGEND}


def test_the_glossary_explains_every_glyph_but_lines_and_bars() -> None:
    explained = {glyph for glyphs in GLYPHS.values() for glyph, *_ in glyphs}
    in_meanings = "".join(meaning for glyphs in GLYPHS.values() for *_, meaning in glyphs)
    lines_bars_and_arrows = set(LEVELS) | set("─│┤├┬┴┼╭╮╰╯└▐▌→←↑↓⇧◀⟨⟩×±≥≤")
    drawn = {glyph for glyph in _ASCII if not glyph.isascii()}
    assert drawn - lines_bars_and_arrows - explained <= set(in_meanings)
    assert set(KV_GLYPHS) == {glyph for glyph, *_ in KV_LEGEND}


def test_the_glossary_defines_the_words_of_the_screen() -> None:
    assert {"TTFT", "ITL", "TPOT", "E2E", "goodput", "service level", "mixed step"} <= set(TERMS)
    assert {"chunk", "budget", "seats", "KV block", "prefix hit", "preemption"} <= set(TERMS)
    assert {"recompute", "held up", "stall", "overlap"} <= set(TERMS)


def test_every_colour_mode_defines_the_same_styles() -> None:
    names = set(styles("dark"))
    assert all(set(styles(mode)) == names for mode in ("light", "ansi", "none"))
    for mode in ("dark", "light", "ansi", "none"):
        skin = Skin(mode)
        assert all(skin.styles[f"{name}+cursor"] != skin.styles["text"] for name in names)


def test_no_text_has_the_colour_of_its_background() -> None:
    for mode in ("dark", "light", "ansi", "none"):
        skin = Skin(mode)
        for name in styles(mode):
            for each in (name, f"{name}+cursor"):
                style = skin.styles[each]
                same = style.color is not None and style.color == style.bgcolor
                assert not same or style.color.is_default, (mode, each)


def test_no_color_turns_all_colours_off() -> None:
    for style in styles("none").values():
        assert style.color is None
        assert style.bgcolor is None


def test_in_a_terminal_of_16_colours_only_those_16_are_used() -> None:
    for style in styles("ansi").values():
        for colour in (style.color, style.bgcolor):
            assert colour is None or colour.is_default or (colour.number or 0) < 16


def test_red_is_used_for_what_is_late_or_down_only() -> None:
    for mode in ("dark", "light", "ansi"):
        looks = styles(mode)
        red = looks["breach"].color
        users = {n for n, s in looks.items() if red in (s.color, s.bgcolor)}
        assert users == {"breach", "badge_down"}


def test_the_number_of_colours_depends_on_the_terminal() -> None:
    assert colour_mode("light", "truecolor", no_color=False) == "light"
    assert colour_mode("dark", "256", no_color=False) == "dark"
    assert colour_mode("dark", "standard", no_color=False) == "ansi"
    assert colour_mode("dark", "truecolor", no_color=True) == "none"
    assert colour_mode("dark", None, no_color=False) == "none"


def glyphs_in(path: Path) -> set[str]:
    """The non-ASCII characters in the texts of a module."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return {glyph for text in texts if isinstance(text, str) for glyph in text if glyph > "~"}


def test_every_glyph_has_an_ascii_form() -> None:
    """A bar of `?` would look like an unknown value."""
    skin = Skin("none", True)
    paths = Path(tui.__file__).parent.rglob("*.py")
    found = {path.name: glyphs_in(path) for path in paths}
    assert "≈" in found["kv_page.py"]
    without = {
        (glyph, name)
        for name, glyphs in found.items()
        for glyph in glyphs
        if skin.text(glyph) in ("?", "") and glyph != "?"
    }
    assert without == set()


async def test_glyphs_and_theme_can_be_changed_while_the_dashboard_runs(
    still_source: Callable[..., Any],
) -> None:
    source = still_source()
    app = Dashboard(source, source.history, any_terminal=True, fps=1.0)
    async with app.run_test(size=(120, 40)) as pilot:
        assert app.main.skin.mode == "dark"
        await pilot.press("T")
        assert app.main.skin.mode == "light"
        await pilot.press("v")
        assert all(s.text.isascii() for s in app.main._compositor.render_strips())
        await pilot.press("v", "T")
        assert app.main.skin.mode == "dark"
        assert "━" in "".join(s.text for s in app.main._compositor.render_strips())
