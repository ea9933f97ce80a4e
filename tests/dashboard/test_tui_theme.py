"""States differ without colour, and every terminal gets the colours and glyphs it can show."""

import ast
from pathlib import Path
from typing import Any

import pytest

from stepscope import tui
from stepscope.recordings.state.lanes import Cell
from stepscope.tui.screens.help import GLYPHS
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
    styles,
)
from tests.support.screens.running import running
from tests.support.screens.screen_text import main_text
from tests.support.screens.still_dashboard import dashboard

SAME_STATE = {  # distinguished by its context, or not meant to be distinguished
    Cell.PREFILL_ALT: Cell.PREFILL,
    Cell.RECOMPUTE: Cell.PREFILL,
    Cell.RECOMPUTE_ALT: Cell.PREFILL,
}


@pytest.mark.parametrize("ascii_only", [False, True])
def test_states_differ_without_colour_and_each_has_a_legend(ascii_only: bool) -> None:
    skin = Skin("none", ascii_only)
    lanes = [LANE_GLYPHS[state] for state in Cell if state not in SAME_STATE]
    states = [skin.text(glyph, LANE_STYLES[glyph]) for glyph in lanes]
    blocks = [skin.text(glyph, style) for glyph, style in zip(KV_GLYPHS, KV_STYLES, strict=True)]
    legend = [skin.text(glyph, style) for glyph, style, _ in LEGEND]
    for glyphs in (states, blocks, legend):
        assert len(set(glyphs)) == len(glyphs)
    assert all(len(glyph) == 1 for glyph in states)
    assert skin.text(LANE_GLYPHS[Cell.PREFILL_ALT]) not in states  # the next chunk
    assert set(LANE_GLYPHS) - {" ", "▒"} <= {glyph for glyph, _, _ in LEGEND}


def test_the_glossary_explains_every_glyph_but_lines_and_bars() -> None:
    explained = {glyph for glyphs in GLYPHS.values() for glyph, *_ in glyphs}
    in_meanings = "".join(meaning for glyphs in GLYPHS.values() for *_, meaning in glyphs)
    lines_bars_and_arrows = set(LEVELS) | set("─│┤├┬┴┼╭╮╰╯└▐▌→←↑↓⇧◀⟨⟩×±≥≤")
    drawn = {glyph for glyph in _ASCII if not glyph.isascii()}
    assert drawn - lines_bars_and_arrows - explained <= set(in_meanings)
    assert set(KV_GLYPHS) == {glyph for glyph, *_ in KV_LEGEND}


@pytest.mark.parametrize("mode", ["dark", "light", "ansi", "none"])
def test_every_colour_mode_has_readable_styles_in_the_colours_of_the_terminal(mode: Any) -> None:
    skin, looks = Skin(mode), styles(mode)
    assert looks.keys() == styles("dark").keys()
    assert all(skin.styles[f"{name}+cursor"] != skin.styles["text"] for name in looks)
    for each in (*looks, *(f"{name}+cursor" for name in looks)):
        style = skin.styles[each]
        same = style.color is not None and style.color == style.bgcolor
        assert not same or style.color.is_default, each
    colours = {each for style in looks.values() for each in (style.color, style.bgcolor) if each}
    if mode == "none":
        assert colours == set()
    else:  # red is for what is late or down
        red = looks["breach"].color
        users = {name for name, style in looks.items() if red in (style.color, style.bgcolor)}
        assert users == {"breach", "badge_down"}
    if mode == "ansi":
        assert all(each.is_default or (each.number or 0) < 16 for each in colours)


def glyphs_in(path: Path) -> set[str]:
    """The non-ASCII characters in the texts of a module."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return {glyph for text in texts if isinstance(text, str) for glyph in text if glyph > "~"}


def test_every_glyph_has_an_ascii_form() -> None:
    """A bar of `?` would look like an unknown value."""
    skin = Skin("none", True)
    found = {path.name: glyphs_in(path) for path in Path(tui.__file__).parent.rglob("*.py")}
    assert "≈" in found["kv_page.py"]
    for name, glyphs in found.items():
        assert not [glyph for glyph in glyphs if skin.text(glyph) in ("?", "")], name


async def test_glyphs_and_theme_can_be_changed_while_the_dashboard_runs(still_source: Any) -> None:
    async with running(dashboard(still_source())) as (app, pilot):
        assert app.main.skin.mode == "dark"
        await pilot.press("T", "v")
        assert app.main.skin.mode == "light"
        assert main_text(app).isascii()
        await pilot.press("v", "T")
        assert app.main.skin.mode == "dark"
        assert "━" in main_text(app)
