"""KV blocks over the steps up to the cursor: those in use, and those kept as prefix cache."""

from collections.abc import Sequence

from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import column_chart
from stepscope.tui.views.lines import Line, Run, framed


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    """Return the panel, `width` x `height` with its frame; one column per step."""
    room = width - 2 - 8
    title: Line = (("in use", "title"), (f"  blocks (last {room} steps)", "muted"))
    if frame.cursor is None:
        return framed([], width, height, title)
    history = frame.history
    summaries = history.summaries(max(0, frame.cursor - room + 1), frame.cursor)
    values: list[float | None] = [None] * (room - len(summaries))
    values += [None if s is None or s.kv_used is None else float(s.kv_used) for s in summaries]
    sizes = [
        s.kv_used + s.kv_cached + s.kv_empty
        for s in summaries
        if s is not None
        and s.kv_used is not None
        and s.kv_cached is not None
        and s.kv_empty is not None
    ]
    if not any(value is not None for value in values):
        text = " the engine does not report its blocks"
        return framed([((text, "muted"),)], width, height, title)
    top = max(sizes, default=1)
    kept: list[float | None] = [None] * (room - len(summaries))
    kept += [
        None if s is None or s.kv_used is None or s.kv_cached is None else s.kv_used + s.kv_cached
        for s in summaries
    ]
    chart = _stacked(values, kept, height - 3, top)
    body: list[Line] = []
    for y, line in enumerate(chart):
        label = fmt.short(top) if y == 0 else "0" if y == len(chart) - 1 else ""
        body.append(((f"{label:>6} ", "muted"), ("│", "frame"), *line))
    marks = "".join("✗" if s is not None and s.num_preempted else "─" for s in summaries)
    marks = "─" * (room - len(marks)) + marks
    axis: list[Run] = [("       ", "muted"), ("┤", "frame")]
    for glyph in marks:
        style = "preempted" if glyph == "✗" else "frame"
        if axis[-1][1] == style:
            axis[-1] = (axis[-1][0] + glyph, style)
        else:
            axis.append((glyph, style))
    body.append(tuple(axis))
    legend: Line = (
        ("█", "kv_used"),
        ("used ", "muted"),
        ("░", "kv_cached"),
        ("cached ", "muted"),
        ("✗", "preempted"),
        ("preemption", "muted"),
    )
    return framed(body, width, height, title, legend)


def _stacked(
    used: Sequence[float | None], kept: Sequence[float | None], height: int, top: int
) -> list[Line]:
    """Return bars of used blocks with the cached blocks stacked on top, rounded to whole cells."""
    below = column_chart(used, height, top, ["kv_used"] * len(used))
    lines: list[Line] = []
    for y, line in enumerate(below):
        cells = "".join(text for text, _ in line)
        runs: list[Run] = []
        for cell, value in zip(cells, kept, strict=True):
            style = "kv_used"
            if cell == " " and value is not None and value / top * height >= height - y - 0.5:
                cell, style = "░", "kv_cached"
            if runs and runs[-1][1] == style:
                runs[-1] = (runs[-1][0] + cell, style)
            else:
                runs.append((cell, style))
        lines.append(tuple(runs))
    return lines
