"""The footer: the most useful keys of the action table, as many as fit; above it, the screens.

`tour_strip`: the strip above a page of a tour: the chapter, its text, and the keys to continue.
"""

import textwrap

from stepscope.tui.settings.action_table import PAGES, Page, Place
from stepscope.tui.settings.actions import Abilities, footer_entries
from stepscope.tui.views.lines import Line, Run, click, fitted, length_of, spread, titled

_ALWAYS = frozenset({"help", "quit"})  # at the end
_FOR_PALETTE = 100  # least width to name the palette beside them


def draw(abilities: Abilities, live: bool, width: int, page: Place = "live") -> list[Line]:
    """Return the line of keys; a click on one does what the key does."""
    entries: dict[str, Line] = {}
    for action_id, keys, label in footer_entries(abilities, page):
        label = _label(abilities, action_id, label, live, page)
        entries[action_id] = click(action_id, (f" {keys} ", "key"), (f"{label} ", "muted"))
    kept = _ALWAYS if width < _FOR_PALETTE else _ALWAYS | {"palette"}
    last = [line for action_id, line in entries.items() if action_id in kept]
    shown, room = [], width - sum(map(length_of, last))
    for action_id, line in entries.items():
        if action_id not in kept:
            room -= length_of(line)
            shown += [line] if room >= 0 else []
    return [tuple(run for line in (*shown, *last) for run in line)]


def tabs(abilities: Abilities, page: Page) -> Line:
    """Return the names of the screens with their keys, the current one in brackets."""
    line: list[Run] = [(" ", "text")]
    for each in PAGES:
        name = "KV" if each == "kv" else each.capitalize()
        action = abilities.action(f"screen_{each}")
        if not action.keys or not abilities.allows(action):
            continue
        if each == page:
            line.append((f"[{action.key} {name}]", "strong"))
        else:
            line += click(action.id, (f" {action.key} ", "key"), (f"{name} ", "muted"))
    return tuple(line)


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
    left = titled(f" {title} ", f" {_PARTS.get(part, '')}")
    if is_held and part == "question":
        left = (*left, (": ", "muted"), ("picture held", "caution"))
    right = tuple(run for key, what in keys for run in ((f" {key} ", "key"), (f"{what} ", "muted")))
    style = "mark" if part == "question" else "text"
    texts = [*textwrap.wrap(text, width - 2), *[""] * TOUR_HEIGHT][: TOUR_HEIGHT - 1]
    return [spread(left, right, width), *(fitted(((f" {x}", style),), width) for x in texts)]
