"""The footer: the most useful keys of the action table, as many as fit; above it, the screens.

`tour_strip`: the strip above a page of a tour: the chapter, its text, and the keys to continue.
"""

import textwrap
from collections.abc import Sequence

from stepscope.tui.settings.action_table import Page, Place
from stepscope.tui.settings.actions import Abilities, footer_entries
from stepscope.tui.views.lines import Line, Run, click, fitted, length_of, spread

_ALWAYS = frozenset({"help", "quit"})
_LAST = _ALWAYS | {"palette"}
_TABS: dict[Page, str] = {
    "live": "Live",
    "step": "Step",
    "request": "Request",
    "kv": "KV",
    "latency": "Latency",
    "knobs": "Knobs",
    "compare": "Compare",
    "fleet": "Fleet",
}
_FIRST = 4  # the palette is left out if fewer other entries than this would fit


def draw(abilities: Abilities, live: bool, width: int, page: Place = "live") -> list[Line]:
    """Return the line of keys; a click on one does what the key does."""
    entries: dict[str, Line] = {}
    for action_id, keys, label in footer_entries(abilities, page):
        label = _label(abilities, action_id, label, live, page)
        entries[action_id] = click(action_id, (f" {keys} ", "key"), (f"{label} ", "muted"))
    others = [line for action_id, line in entries.items() if action_id not in _LAST]
    shown: list[Line] = []
    for kept in (_LAST, _ALWAYS):
        last = [line for action_id, line in entries.items() if action_id in kept]
        shown = _fitting(others, width - sum(map(length_of, last)))
        if len(shown) >= min(_FIRST, len(others)):
            break
    return [tuple(run for line in (*shown, *last) for run in line)]


def tabs(abilities: Abilities, page: Page) -> Line:
    """Return the names of the screens with their keys, the current one in brackets."""
    line: list[Run] = [(" ", "text")]
    for each, name in _TABS.items():
        action = abilities.action(f"screen_{each}")
        if not action.keys or not abilities.allows(action):
            continue
        if each == page:
            line.append((f"[{action.key} {name}]", "strong"))
        else:
            line += click(action.id, (f" {action.key} ", "key"), (f"{name} ", "muted"))
    return tuple(line)


def _fitting(lines: Sequence[Line], room: int) -> list[Line]:
    shown = []
    for line in lines:
        room -= length_of(line)
        if room < 0:
            break
        shown.append(line)
    return shown


def _label(abilities: Abilities, action_id: str, label: str, live: bool, page: Place) -> str:
    if page in ("fleet", "start"):
        label = {"step_back": "Order by", "inspect": "Open"}.get(action_id, label)
    if action_id == "live" and (page in ("compare", "start") or "replay" in abilities.has):
        return "End"
    return "Go on" if action_id == "pause" and not live else label


TOUR_HEIGHT = 4
_PARTS = {"before": "what comes", "question": "look", "answer": "try"}


def tour_strip(
    title: str,
    part: str,
    text: str,
    keys: tuple[tuple[str, str], ...],
    width: int,
    *,
    is_held: bool,
) -> list[Line]:
    """Return the strip, `TOUR_HEIGHT` lines: chapter, text, and pairs of a key and what it does."""
    left: Line = ((f" {title} ", "title"), (f" {_PARTS.get(part, '')}", "muted"))
    if is_held and part == "question":
        left = (*left, (": ", "muted"), ("picture held", "caution"))
    right = tuple(run for key, what in keys for run in ((f" {key} ", "key"), (f"{what} ", "muted")))
    lines = [spread(left, right, width)]
    texts = textwrap.wrap(text, width - 2)
    style = "mark" if part == "question" else "text"
    lines += [fitted(((f" {each}", style),), width) for each in texts[: TOUR_HEIGHT - 1]]
    return [*lines, *[fitted((), width)] * (TOUR_HEIGHT - len(lines))]
