"""The scrub bar: all steps in memory from left to right, with what one may want to go back to."""

from stepscope.tui import format as fmt
from stepscope.tui.frame import Frame
from stepscope.tui.widgets.lines import Line, Run

_MARKS = {"preempt": "✗", "knobs": "◆", "mark": "▼", "gap": "?"}
_RANK = " ✗?◆▼"  # of several in a cell the last in here is shown
_STYLES = {"✗": "preempted", "◆": "mark", "▼": "mark", "?": "caution"}
_LEFT = len(" 00:00:00 ├")


def bar_width(width: int) -> int:
    """Cells of the bar itself."""
    return max(0, width - _LEFT - 37)


def step_at(frame: Frame, x: int, width: int) -> int | None:
    """The step under column `x` of the line, None beside the bar."""
    first, last = frame.first_step, frame.last_step
    cells = bar_width(width)
    x -= _LEFT
    if first is None or last is None or not 0 <= x < cells:
        return None
    return first + round((last - first) * x / max(1, cells - 1))


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    first, last = frame.first_step, frame.last_step
    cells = bar_width(width)
    if first is None or last is None or cells < 4:
        return [((" no step in memory yet", "muted"),)]
    extent = max(1, last - first)

    def place(step: int) -> int:
        return round((min(max(step, first), last) - first) / extent * (cells - 1))

    bar = ["─"] * cells
    for event in frame.landmarks:
        x, glyph = place(event.step), _MARKS[event.kind]
        if bar[x] == "─" or _RANK.index(glyph) > _RANK.index(bar[x]):
            bar[x] = glyph
    runs: list[Run] = [
        (f" {fmt.clock(frame.wall_ns(first))} ", "muted"),
        ("├", "frame"),
    ]
    at = cells - 1 if frame.cursor is None else place(frame.cursor)
    for x, glyph in enumerate(bar):
        if x == at:
            runs.append(("█", "strong"))
        else:
            runs.append((glyph, _STYLES.get(glyph, "frame")))
    end = "LIVE" if frame.view.live else ""
    runs += [
        ("┤", "frame"),
        (f" {fmt.clock(frame.wall_ns(last))} ", "muted"),
        (f"{end:<5}", "good"),
        (f"{fmt.count(frame.history.num_steps)} steps", "muted"),
    ]
    return [tuple(runs)]
