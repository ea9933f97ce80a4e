"""Plots a recording: budget, latencies and memory of its steps over time.

It lays out panels below each other and draws them with matplotlib, from a `PlotSeries` alone.
Events (knob changes, marks, pauses, losses) are lines across all panels, with labels above.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepscope.recordings.plot import axes
from stepscope.recordings.plot.panels import PANELS, kv_cache
from stepscope.recordings.plot.series import EventKind, PlotSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ROWS = 5  # of labels
_MAX_LINES = 120  # more would be a grey wall
_MAX_TEXT = 72
_GLYPHS: dict[EventKind, str] = {"knobs": "◆", "mark": "▼", "pause": "‖", "lost": "?"}
# In inches; widths of letters are averages with some slack.
_LETTER, _SMALL_LETTER = 0.06, 0.058
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 1.35, 0.58, 0.62  # margins
_BETWEEN = 0.3  # between panels
_STEP_AXIS = 0.3  # from the time axis down to the step axis
_STRIP = 0.16  # height of a row of labels
_NUM_TICKS = 9  # on the step axis


def num_columns(width: float) -> int:
    return max(50, round((width - _LEFT - _RIGHT) * axes.DPI))


def figure(
    series: PlotSeries,
    heading: str,
    details: Sequence[str],
    target: str,
    size: tuple[float, float],
    theme: axes.FigureTheme,
) -> bytes:
    """Draw the plot and return the bytes of the file.

    Raises MissingPackage: matplotlib is not installed.
    """
    grid = axes.PlotGrid(series, axes.COLOURS[theme])
    return axes.rendered(
        lambda drawing: _paint(drawing, grid, heading, details), target, size, theme
    )


def _paint(drawing: "Figure", grid: axes.PlotGrid, heading: str, details: Sequence[str]) -> None:
    """Draw heading, events and panels, from top to bottom."""
    width, height = drawing.get_size_inches()
    room = int((width - _LEFT - 0.1) / _LETTER)
    lines = [line[: room - 1] + "…" * (len(line) >= room) for line in details]
    look: dict[str, Any] = {"va": "top", "parse_math": False}  # the texts may come from users
    x = _LEFT / width
    drawing.text(x, 1 - 0.1 / height, heading, fontsize=11, fontweight="bold", **look)
    look |= {"fontsize": 7.5, "linespacing": 1.3, "color": grid.colours.muted}
    drawing.text(x, 1 - 0.31 / height, "\n".join(lines), **look)
    head = _TOP + _STRIP * (len(lines) - 1)
    top = height - head - 0.12 - _STRIP * _draw_events(drawing, grid, height - head + 0.1)
    has_kv = not grid.np.isnan(grid.series.kv_used).all()
    shown = {draw: share for draw, share in PANELS.items() if has_kv or draw is not kv_cache}
    free = top - _BOTTOM - _BETWEEN * (len(shown) - 1)
    for draw, share in shown.items():
        rows = free * share / sum(shown.values())
        inner = (width - _LEFT - _RIGHT) / width
        panel = drawing.add_axes((x, (top - rows) / height, inner, rows / height))
        panel.patch.set_alpha(0.0)  # the lines of events are below the panels
        draw(panel, grid)
        top -= rows + _BETWEEN
        if top > _BOTTOM:
            panel.tick_params(labelbottom=False)
        else:
            _step_numbers(panel, grid, rows)


def _draw_events(drawing: "Figure", grid: axes.PlotGrid, top: float) -> int:
    """Draw the lines and labels of all events, from `top` inches down.

    A label is right of its line, or ends at the right edge of the panels. Returns the number of
    rows of labels; texts that fit into none of them are left out.
    """
    from matplotlib.lines import Line2D

    (width, height), series, colours = drawing.get_size_inches(), grid.series, grid.colours
    inner, ends, num_hidden = width - _LEFT - _RIGHT, [0.0] * _MAX_ROWS, 0
    inks = {
        "knobs": colours.knob, "mark": colours.ink, "pause": colours.muted, "lost": colours.breach,
    }  # fmt: skip
    look: dict[str, Any] = {"fontsize": 7.0, "va": "top", "parse_math": False}
    for number, event in enumerate(series.events):
        text = f"{_GLYPHS[event.kind]} {event.text}"
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
        x, length = inner * event.time_ns / series.duration_ns, len(text) * _SMALL_LETTER
        begin = max(0.0, min(x + 0.05, inner - length))
        row = next((row for row, end in enumerate(ends) if end <= begin), _MAX_ROWS)
        if number < _MAX_LINES:
            x, upper = (_LEFT + x) / width, (top - (row + 0.2) * _STRIP) / height
            dashes = (0, (4, 2)) if event.kind == "knobs" else (0, (1, 1.5))
            line = Line2D((x, x), (_BOTTOM / height, upper), color=inks[event.kind], zorder=-1)
            line.set(linewidth=0.8, linestyle=dashes)
            drawing.add_artist(line)
        if row == _MAX_ROWS:
            num_hidden += 1
            continue
        ends[row] = begin + length
        x, y = (_LEFT + begin) / width, (top - row * _STRIP) / height
        box = {"facecolor": colours.paper, "edgecolor": "none", "pad": 0.6}
        drawing.text(x, y, text, color=inks[event.kind], bbox=box, **look)
    if num_hidden:
        text = f"and {num_hidden:,} more changes, marks or pauses without a label"
        x, y = (_LEFT + inner) / width, (top + 0.17) / height
        drawing.text(x, y, text, ha="right", color=colours.muted, **look)
    return sum(end > 0 for end in ends)


def _step_numbers(panel: "Axes", grid: axes.PlotGrid, height: float) -> None:
    """Draw an axis of step numbers below the time axis, to find a step in a replay."""
    from matplotlib.ticker import FixedLocator

    firsts, np = grid.filled(grid.series.first_steps), grid.np
    columns = np.linspace(0, len(firsts) - 1, _NUM_TICKS).astype(int)
    axis = panel.secondary_xaxis(-_STEP_AXIS / height)
    axis.xaxis.set_major_locator(FixedLocator(grid.middles[columns]))
    axis.set_xticklabels([f"{int(step):,}" for step in firsts[columns]])
    since = f"{grid.unit} since step {grid.series.first_step:,}"
    look: dict[str, Any] = {"textcoords": "offset points", "va": "top", "fontsize": 7.5}
    for below, name in ((0.0, since), (_STEP_AXIS, "step")):
        where = (1.0, -below / height)
        panel.annotate(name, where, xycoords="axes fraction", xytext=(6, -3.5), **look)
