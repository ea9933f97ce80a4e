"""The scrub bar: a line of all steps, with marks, knob changes, preemptions and lost records.

It covers the steps in memory, or all steps of a replayed file. A click goes to that step.
"""

from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, Run

_MARKS = {"preempt": "✗", "knobs": "◆", "mark": "▼", "gap": "?"}
_RANK = " ✗?◆▼"  # of several glyphs in a cell, the last in this order is shown
_STYLES = {"█": "strong", "✗": "preempted", "◆": "mark", "▼": "mark", "?": "caution"}
_LEFT = len(" 00:00:00 ├")
_RIGHT = len("┤ 00:00:00 STALE 100,000 steps in memory")


def bar_width(width: int) -> int:
    """Return how many cells of the line the bar takes; the others hold its labels."""
    return max(0, width - _LEFT - _RIGHT)


def step_at(frame: Frame, x: int, width: int) -> int | None:
    """Return the step under cell `x` of the line; None beside the bar."""
    cells = bar_width(width)
    x -= _LEFT
    if frame.extent is None or not 0 <= x < cells:
        return None
    first, last = frame.extent
    return first + round((last - first) * x / max(1, cells - 1))


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    cells = bar_width(width)
    if frame.extent is None or cells < 4:
        return [((f" {_nothing(frame)}", "muted"),)]
    first, last = frame.extent
    extent = max(1, last - first)

    def place(step: int) -> int:
        return round((min(max(step, first), last) - first) / extent * (cells - 1))

    bar = ["─"] * cells
    for event in frame.landmarks:
        x, glyph = place(event.step), _MARKS[event.kind]
        if bar[x] == "─" or _RANK.index(glyph) > _RANK.index(bar[x]):
            bar[x] = glyph
    bar[place(last if frame.cursor is None else frame.cursor)] = "█"
    times = [frame.wall_ns(step) for step in (first, last)]
    start, end = fmt.count(first), fmt.count(last)
    if None not in times:
        start, end = (fmt.clock(wall_ns) for wall_ns in times)
    unit = "record" if frame.is_summed_up else "step"
    memory = f"{fmt.plural(frame.history.num_steps, unit)} in memory"
    marks = ((glyph, _STYLES.get(glyph, "frame")) for glyph in bar)
    left: Line = ((f" {start:>8} ", "muted"), ("├", "frame"))
    right: Line = (("┤", "frame"), (f" {end:<8} ", "muted"), _state(frame), (memory, "muted"))
    return [(*left, *marks, *right)]


def _state(frame: Frame) -> Run:
    if frame.is_replay or not frame.view.live:
        return "     ", "good"
    if frame.status in ("stale", "down"):
        return f"{frame.status.upper():<5} ", "caution"
    return ("LIVE " if frame.status == "live" else "     "), "good"


def _nothing(frame: Frame) -> str:
    if frame.extent is None and frame.step is not None and frame.state.state == "idle":
        return f"idle since step {fmt.count(frame.step)}; 'stepscope load' sends requests"
    return "no step in memory yet"
