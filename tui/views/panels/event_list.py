"""The events up to the cursor: a framed list at the right edge, or packed into one or two lines."""

import textwrap
from functools import lru_cache

from stepscope.recordings.state.series.events import EventKind, SessionEvent
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, Run, clean, framed, length_of, spot

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


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the events, newest last: as a framed list if that fits, else packed into lines."""
    if height < 3:
        return _packed(frame, width, height)
    events, room = frame.events[-(height - 2) :], height - 2
    body: list[Line] = []
    for number, event in enumerate(events):
        entry = _wrapped(frame, event, width - 4, room - len(body) - (len(events) - number - 1))
        body += [(spot("step", event.step), (" ", "text"), *line) for line in entry]
    return framed(body, width, height, (("events", "title"),))


def _packed(frame: Frame, width: int, height: int) -> list[Line]:
    lines: list[Line] = []
    line: Line = ()
    events = [event for event in frame.events if event.kind != "finish"]
    for event in reversed(events):
        entry = (
            spot("step", event.step),
            (" ", "text"),
            *_entry(frame, event, width - 2),
            ("  ", "text"),
        )
        if event is events[0] and not line:  # nothing else needs the room
            entry_lines = _wrapped(frame, event, width - 2, height - len(lines))
            lines += [(entry[0], (" ", "text"), *each) for each in entry_lines[::-1]]
            break
        if line and length_of(line) + length_of(entry) > width:
            lines.append(line)
            if len(lines) == height:
                break
            line = ()
        line = (*entry, *line)
    else:
        lines.append(line)
    return [()] * (height - len(lines)) + lines[::-1]


def _wrapped(frame: Frame, event: SessionEvent, width: int, most: int) -> list[Line]:
    first = _entry(frame, event, 10_000)
    indent = length_of(first[:-1]) + 1
    text = first[-1][0].strip()
    cut = _cut(text, max(10, width - indent))
    if len(cut) > most:
        return [_entry(frame, event, width)]
    lines: list[Line] = [(*first[:-1], (f" {cut[0]}", "text"))]
    return [*lines, *(((" " * indent + each, "text"),) for each in cut[1:])]


@lru_cache(maxsize=256)  # each picture draws the same events again
def _cut(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width) or [""]


def _entry(frame: Frame, event: SessionEvent, width: int) -> Line:
    when = fmt.clock(frame.history.wall_ns(event.time_ns))
    return (
        (f"{when} ", "muted"),
        ICONS[event.kind],
        (" " + clean(event.text, max(0, width - len(when) - 3)), "text"),
    )
