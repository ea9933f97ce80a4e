"""The help page: the keys that work here, how to read the glyphs, and the glossary."""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from textual.geometry import Region

from stepscope.recordings.attribution.causes import WORDS
from stepscope.tui.screens.overlays.overlay import Overlay
from stepscope.tui.settings.action_table import GROUPS, Place
from stepscope.tui.settings.actions import Abilities
from stepscope.tui.views import format as fmt
from stepscope.tui.views.glossary import GLYPHS, TERMS
from stepscope.tui.views.lines import Line, Run, clean, fitted, framed
from stepscope.tui.views.pages.page_views import PAGE_VIEWS
from stepscope.tui.views.theme import CAUSE_GLYPHS, KV_LEGEND, LEGEND, Skin

_KEY_WIDTH = 8
_WORD_WIDTH = 15
_GLOSSARY_KEY = "g"
_TWO_COLUMNS = 116  # the least width for two columns
_MAX_WIDTH = 190
_READING = (
    "The budget chart has two scales. The upper rows show the prefill tokens of each step against "
    "the token budget (dotted line). The bottom row shows which steps decoded; its label says how "
    "many requests decoded at the cursor (RUN counts all running requests, at most max_num_seqs, "
    "also those that prefill). Below the chart each request has a lane; a column is the same step "
    "in both. A column that merges several steps shows the worst of them: "
    "preempted, then ended, then prefill, then decode. Latencies are exact samples of the last "
    "minute, from the engine's own clock; the operator's pauses are not counted."
)
_START_READING = (
    "The engines on this machine and in the config file, the recordings in this folder, the "
    "samples, and the demo. {inspect} opens the selected line, a click any. The list "
    "looks for engines once a second. If a session ends with an error, the error stands below the "
    "list."
)
_KV_LEGEND: tuple[Run, ...] = (
    *((glyph, style) for glyph, style, _ in KV_LEGEND),
    ("    KV blocks: " + ", ".join(meaning for *_, meaning in KV_LEGEND), "text"),
)


def help_blocks(
    abilities: Abilities, page: Place, width: int = 0, log_file: Path | None = None
) -> list[list[Line]]:
    """Return the blocks of the page, each with a heading: the screen, its keys, its glyphs."""
    name, reading = _about(page)
    keys = {action.id: action.key for action in abilities.actions}
    reading = reading.format_map(keys)
    blocks: list[list[Line]] = [[_heading(f"This is the {name}"), *_text(reading, width)]]
    available = abilities.on(page)
    for group, title in GROUPS.items():
        actions = [action for action in available if action.group == group]
        if actions:
            block = [_heading(f"{title}: keys")]
            for action in actions:
                block += _entry(action.shown, "key", action.help, width)
            blocks.append(block)
    if glyphs := _glyphs(page, width):
        blocks.append([_heading("Glyphs"), *glyphs])
    if log_file is not None:
        blocks.append([(), *_text(f"Errors are written to {clean(str(log_file), 80)}", width)])
    return blocks


def glossary_blocks(width: int = 0) -> list[list[Line]]:
    words: list[Line] = [_heading("Words")]
    for word, meaning in TERMS.items():
        words += _entry(word, "key", meaning, width, _WORD_WIDTH)
    blocks = [words]
    for title, glyphs in GLYPHS.items():
        block = [_heading(title)]
        for glyph, style, meaning in glyphs:
            block += _entry(glyph, style, meaning, width)
        blocks.append(block)
    return blocks


def _about(page: Place) -> tuple[str, str]:
    if page == "start":
        return "start screen", _START_READING
    view = PAGE_VIEWS.get(page)
    return ("main screen", _READING) if view is None else (view.name, view.reading)


def _heading(text: str) -> Line:
    return ((f" {text}", "title"),)


def _text(text: str, width: int) -> list[Line]:
    return [((f"  {line}", "text"),) for line in _wrapped(text, width - 4)]


def _entry(key: str, style: str, text: str, width: int, key_width: int = _KEY_WIDTH) -> list[Line]:
    first, *more = _wrapped(text, width - key_width - 4)
    gap = " " * max(1, key_width - len(key))
    line: Line = (("  ", "text"), (key, style), (gap, "text"), (first, "text"))
    return [line, *(((" " * (key_width + 2) + rest, "text"),) for rest in more)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width) if width > 20 else [text]


def _glyphs(page: Place, width: int) -> list[Line]:
    """Return how to read the glyphs of a page, if they are drawn on it alone; see the glossary."""
    lines: list[Line] = []
    if page == "request":
        for cause, (glyph, style) in CAUSE_GLYPHS.items():
            lines += _entry(glyph, style, WORDS[cause].label, width)
    elif page == "live":
        for glyph, style, meaning in LEGEND:
            lines += _entry(glyph, style, meaning, width)
    return [*lines, (("  ", "text"), *_KV_LEGEND)] if page in ("live", "kv") else lines


class HelpPage(Overlay[None]):
    """The help on a page. It scrolls and turns to the glossary and back; other keys close it."""

    def __init__(
        self, skin: Skin, abilities: Abilities, page: Place, log_file: Path | None = None
    ) -> None:
        super().__init__(skin)
        self._abilities = abilities
        self._page: Place = page
        self._log_file = log_file
        self._first = 0
        self._is_glossary = False

    def _blocks(self, width: int) -> list[list[Line]]:
        if self._is_glossary:
            return glossary_blocks(width)
        return help_blocks(self._abilities, self._page, width, self._log_file)

    def _content(self, width: int) -> list[Line]:
        if width < _TWO_COLUMNS:
            return _joined(self._blocks(width))
        half = width // 2
        blocks = self._blocks(half)
        total = sum(len(block) + 1 for block in blocks)
        left = [blocks.pop(0)]
        while blocks and sum(len(block) + 1 for block in left) + len(blocks[0]) <= total // 2 + 4:
            left.append(blocks.pop(0))
        columns = zip_longest(_joined(left), _joined(blocks), fillvalue=())
        return [(*fitted(line, half), *other) for line, other in columns]

    def place(self, width: int, height: int) -> Region:
        box_width = min(width, _MAX_WIDTH)
        box_height = min(height, len(self._content(box_width - 2)) + 2)
        return Region((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)

    def lines(self, width: int, height: int) -> list[Line]:
        content = self._content(width - 2)
        self._first = max(0, min(self._first, len(content) - (height - 2)))
        more = len(content) - self._first - (height - 2)
        below = f" {more} more lines below;" if more > 0 else ""
        name, other = ("glossary", "help") if self._is_glossary else ("help", "glossary")
        turn = f"{below} {_GLOSSARY_KEY} {other}, ↑/↓"
        forms = (f"{turn} PgUp/PgDn scroll, any other key closes", f"{turn} scroll")
        hint = fmt.first_fitting([self.hint(form) for form in forms], width - 16)
        return framed(content[self._first :], width, height, name, hint)

    def clicked(self, x: int, y: int) -> None:
        self.dismiss(None)

    def pressed(self, key: str, character: str | None) -> None:
        page = max(1, self.size.height - 6)
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": page, "pageup": -page}
        if key in steps:
            self._first += steps[key]
        elif key == _GLOSSARY_KEY:
            self._is_glossary = not self._is_glossary
            self._first = 0
        else:
            self.dismiss(None)


def _joined(blocks: Sequence[list[Line]]) -> list[Line]:
    return [line for block in blocks for line in (*block, ())][:-1]
