"""The events of a session: a list up to the cursor, and the scrub bar, a line of all steps.

The list is framed at the right edge, or packed into as many lines as there are. The scrub bar is of
the steps in memory, or all steps of a replayed file; a click goes to that step.
"""

from stepscope.recordings.state.audit_text import with_short_names
from stepscope.recordings.state.events import EventKind, SessionEvent
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
_NO_EVENT: Run = ("─", "frame")
# Of several events in a cell of the scrub bar, the last in this order is shown.
_RANKED = [_NO_EVENT, *(ICONS[kind] for kind in ("preempt", "gap", "knobs", "mark"))]
_LEFT = len(" 00:00:00 ├")
_RIGHT = len("┤ 00:00:00 STALE 100,000 steps in memory")


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
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
    room = max(0, width - len(when) - 3)
    text = " " + clean(fmt.first_fitting((event.text, with_short_names(event.text)), room), room)
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
