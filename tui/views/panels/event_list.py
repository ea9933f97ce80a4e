"""The events up to the cursor: a framed list at the right edge, or as many lines as there are."""

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
    body: list[Line] = [
        (spot("step", event.step), (" ", "text"), *_entry(frame, event, width - 4))
        for event in frame.events[-(height - 2) :]
    ]
    return framed(body, width, height, "events")


def _packed(frame: Frame, width: int, height: int) -> list[Line]:
    lines: list[Line] = [()]
    for event in reversed([event for event in frame.events if event.kind != "finish"]):
        said = _entry(frame, event, width - 2)
        entry = (spot("step", event.step), (" ", "text"), *said, ("  ", "text"))
        if lines[-1] and length_of(lines[-1]) + length_of(entry) > width:
            if len(lines) == height:
                break
            lines.append(())
        lines[-1] = (*entry, *lines[-1])
    return [()] * (height - len(lines)) + lines[::-1]


def _entry(frame: Frame, event: SessionEvent, width: int) -> Line:
    when = fmt.clock(frame.history.wall_ns(event.time_ns))
    text = " " + clean(event.text, max(0, width - len(when) - 3))
    return ((f"{when} ", "muted"), ICONS[event.kind], (text, "text"))
