"""The bottom of the screen: the events up to the cursor, the scrub bar, the keys and the screens.

The events are a framed list at the right edge, or packed into as many lines as there are. The scrub
bar has all steps in memory, or of a replayed file; a click goes to that step. The keys are the most
useful of the action table, as many as fit.

`tour_strip`: the strip above a page of a tour: the chapter, its text, and the keys to continue.
"""

import textwrap

from stepscope.recordings.state.series.events import EventKind, SessionEvent
from stepscope.tui.settings.action_table import Page, Place
from stepscope.tui.settings.actions import Abilities, footer_entries
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import (
    Line,
    Run,
    clean,
    click,
    fitted,
    framed,
    length_of,
    spot,
    spread,
    titled,
)

_ALWAYS = frozenset({"help", "quit"})  # at the end
_FOR_PALETTE = 100  # least width to name the palette beside them
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
ICONS: dict[EventKind, Run] = {
    "preempt": ("✗", "preempted"),
    "finish": ("●", "finished"),
    "abort": ("○", "aborted"),
    "reject": ("○", "caution"),
    "knobs": ("◆", "mark"),
    "slo": ("!", "breach"),
    "gap": ("?", "caution"),
    "mark": ("▼", "mark"),
    "engine": ("▲", "caution"),
}
_NO_EVENT: Run = ("─", "frame")
# Of several events in a cell of the scrub bar, the last in this order is shown.
_RANKED = [_NO_EVENT, *(ICONS[kind] for kind in ("preempt", "gap", "knobs", "mark"))]
_LEFT = len(" 00:00:00 ├")
_RIGHT = len("┤ 00:00:00 STALE 100,000 steps in memory")


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
    for each, name in _TABS.items():
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


def events(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the events, newest last: as a framed list if that fits, else packed into lines."""
    if height >= 3:
        shown = frame.events[-(height - 2) :]
        return framed([_entry(frame, each, width - 4) for each in shown], width, height, "events")
    lines: list[Line] = [()]
    for event in reversed([event for event in frame.events if event.kind != "finish"]):
        entry = (*_entry(frame, event, width - 2), ("  ", "text"))
        if lines[-1] and length_of(lines[-1]) + length_of(entry) > width:
            if len(lines) == height:
                break
            lines.append(())
        lines[-1] = (*entry, *lines[-1])
    return [()] * (height - len(lines)) + lines[::-1]


def _entry(frame: Frame, event: SessionEvent, width: int) -> Line:
    when = frame.clock(event.time_ns)
    text = " " + clean(event.text, max(0, width - len(when) - 3))
    at, blank = spot("step", event.step), (" ", "text")
    return (at, blank, (f"{when} ", "muted"), ICONS[event.kind], (text, "text"))


def step_at(frame: Frame, x: int, width: int) -> int | None:
    """Return the step under cell `x` of the scrub bar; None beside the bar."""
    cells = max(0, width - _LEFT - _RIGHT)
    x -= _LEFT
    if frame.extent is None or not 0 <= x < cells:
        return None
    first, last = frame.extent
    return first + round((last - first) * x / max(1, cells - 1))


def scrub_bar(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    cells = max(0, width - _LEFT - _RIGHT)
    if frame.extent is None or cells < 4:
        said = "no step in memory yet"
        if frame.extent is None and frame.step is not None and frame.state.state == "idle":
            said = f"idle since step {fmt.count(frame.step)}; 'stepscope load' sends requests"
        return [((f" {said}", "muted"),)]
    first, last = frame.extent

    def place(step: int) -> int:
        return round((min(max(step, first), last) - first) / max(1, last - first) * (cells - 1))

    bar = [_NO_EVENT] * cells
    for event in frame.landmarks:
        x = place(event.step)
        bar[x] = max(bar[x], ICONS[event.kind], key=_RANKED.index)
    bar[place(last if frame.cursor is None else frame.cursor)] = ("█", "strong")
    times = [frame.wall_ns(step) for step in (first, last)]
    start, end = fmt.count(first), fmt.count(last)
    if None not in times:
        start, end = (fmt.clock(wall_ns) for wall_ns in times)
    memory = f"{fmt.plural(frame.history.num_steps, frame.unit)} in memory"
    left: Line = ((f" {start:>8} ", "muted"), ("├", "frame"))
    right: Line = (("┤", "frame"), (f" {end:<8} ", "muted"), _state(frame), (memory, "muted"))
    return [(*left, *bar, *right)]


def _state(frame: Frame) -> Run:
    if frame.is_replay or not frame.view.live:
        return "     ", "good"
    if frame.status in ("stale", "down"):
        return f"{frame.status.upper():<5} ", "caution"
    return ("LIVE " if frame.status == "live" else "     "), "good"
