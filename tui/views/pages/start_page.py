"""Draws the start screen: sections of entries, as many as fit around the selected one."""

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.tui.settings.action_table import NO_KEY
from stepscope.tui.settings.actions import Abilities
from stepscope.tui.views.framed_panels import first_shown
from stepscope.tui.views.lines import Line, Run, clean, fitted, length_of, spot, spread
from stepscope.tui.views.pages.start_list import Entry, Section

_TITLE_WIDTHS = ((120, 40), (100, 26), (0, 18))  # least width of the screen, width of the titles
_LEAST_CELL = 10  # least width of the last column, or it is left out
NUM_DIGITS = 9  # entries that a digit can open
_NOWHERE = spot("none", "")
# Actions of the table, with their labels here. The digits belong to no action.
_FOOTER: tuple[tuple[tuple[str, ...], str], ...] = (
    (("lane_up", "lane_down"), "Choose"),
    (("inspect",), "Open"),
    ((), "Open at once"),
    (("endpoint",), "Address"),
    (("help",), "Help"),
    (("quit",), "Quit"),
    (("theme",), "Theme"),
    (("glyphs",), "Glyphs"),
    (("palette",), "Palette"),
)


class DrawnStartPage(NamedTuple):
    """The lines of the start screen, and for each line the index of its entry, or None."""

    lines: list[Line]
    entries: list[int | None]


def entries_of(sections: Sequence[Section]) -> list[Entry]:
    """Return the entries of all sections, in order."""
    return [entry for section in sections for entry in section.entries]


def digits_of(sections: Sequence[Section]) -> dict[int, int]:
    """Return digit -> index of its entry; sections that never change get the first."""
    places = []
    number = 0
    for section in sections:
        places += [(not section.is_fixed, number + each) for each in range(len(section.entries))]
        number += len(section.entries)
    return {digit: place for digit, (_, place) in enumerate(sorted(places)[:NUM_DIGITS], 1)}


def draw(sections: Sequence[Section], selected: int, width: int, height: int) -> DrawnStartPage:
    """Return the start screen, scrolled so that the selected entry is visible."""
    lines: list[Line] = []
    numbers: list[int | None] = []
    number = 0
    digits = {place: str(digit) for digit, place in digits_of(sections).items()}
    is_tight = sum(len(s.entries) or 1 for s in sections) + 2 * len(sections) > height + 1
    for section in sections:
        if lines and not is_tight:
            lines.append(())
            numbers.append(None)
        lines.append(_heading(section, width))
        numbers.append(None)
        for entry in section.entries:
            lines.append(_entry(section, entry, digits.get(number, " "), number == selected, width))
            numbers.append(number)
            number += 1
        if not section.entries:
            lines.append(((f"   {clean(section.otherwise, width)}", "muted"),))
            numbers.append(None)
    at = numbers.index(selected) if selected in numbers else None
    first = first_shown(len(lines), height, at)
    shown = [fitted(line, width) for line in lines[first : first + height]]
    places = numbers[first : first + height]
    rest = height - len(shown)
    return DrawnStartPage([*shown, *[fitted((), width)] * rest], [*places, *[None] * rest])


def header(version: str, width: int) -> Line:
    left: Line = (
        (f" stepscope {version}", "strong"),
        ("  every forward step of an LLM inference engine", "muted"),
    )
    return fitted(left, width)


def footer(abilities: Abilities, width: int) -> Line:
    """Return a line of the most useful keys, as many as fit; they can be clicked."""
    line: Line = ()
    for action_ids, label in _FOOTER:
        shown = [abilities.key(each) for each in action_ids]
        keys = "/".join(each for each in shown if each != NO_KEY) or f"1-{NUM_DIGITS}"
        if action_ids and NO_KEY in shown:
            continue
        click = spot("do", action_ids[-1]) if action_ids else _NOWHERE
        more: Line = (click, (f" {keys} ", "key"), (f"{label} ", "muted"), _NOWHERE)
        if length_of(line) + length_of(more) > width:
            break
        line = (*line, *more)
    right: Line = (("'stepscope -h' lists all commands ", "muted"),)
    if length_of(line) + length_of(right) <= width:
        return spread(line, right, width)
    return fitted(line, width)


def _columns(section: Section, width: int) -> list[tuple[str, int, bool]]:
    """Return the columns that fit after the title; one of width 0 fills the rest."""
    left = width - 3 - _title_width(width) - 1
    found = []
    for name, wanted, is_right in section.columns:
        room = wanted or left
        if left < (wanted or _LEAST_CELL):
            break
        found.append((name, room, is_right))
        left -= room + 1
    return found


def _title_width(width: int) -> int:
    return next(wide for least, wide in _TITLE_WIDTHS if width >= least)


def _heading(section: Section, width: int) -> Line:
    room = _title_width(width)
    title = section.title if len(section.title) <= room + 2 else section.title.split(" on ")[0]
    runs: list[Run] = [(f" {clean(title, room + 2):<{room + 2}} ", "title")]
    for name, cells, is_right in _columns(section, width):
        text = clean(name, cells)
        runs.append(((text.rjust(cells) if is_right else text.ljust(cells)) + " ", "muted"))
    return tuple(runs)


def _title(entry: Entry, room: int) -> str:
    """Return the title of an entry, cut to fit; of a long file name the end tells most."""
    title = clean(entry.title, max(1, len(entry.title)))
    if entry.choice.kind == "file" and len(title) > room:
        return "…" + title[len(title) - room + 1 :]
    return clean(title, room)


def _entry(section: Section, entry: Entry, digit: str, is_selected: bool, width: int) -> Line:
    mark = "+cursor" if is_selected else ""
    plain = f"text{mark}"
    room = _title_width(width)
    runs: list[Run] = [
        ("▶" if is_selected else " ", plain),
        (f"{digit} ", f"key{mark}"),
        (f"{_title(entry, room):<{room}} ", f"{entry.style}{mark}"),
    ]
    columns = _columns(section, width)
    last = len(entry.cells) - 1
    if last < len(section.columns) - 1:
        before_it = columns[:last]
        used = 4 + room + sum(cells + 1 for _, cells, _ in before_it)
        columns = [*before_it, ("", max(0, width - used), False)]
    for (_, cells, is_right), (text, style) in zip(columns, entry.cells, strict=False):
        text = clean(text, cells)
        before = cells - len(text) if is_right else 0
        after = cells - len(text) - before + 1
        runs += [(" " * before, plain), (text, f"{style}{mark}"), (" " * after, plain)]
    used = length_of(runs)
    return (*fitted(runs, min(used, width)), (" " * max(0, width - used), plain))
