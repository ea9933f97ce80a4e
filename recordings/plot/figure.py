"""Plots a recording: budget, latencies and memory of its steps over time.

It lays out panels below each other and draws them with matplotlib, from a `PlotSeries` alone.
Events (knob changes, marks, pauses, losses) are lines across all panels, with labels above.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.plot import axes
from stepscope.recordings.plot.panels import PANELS, kv_cache
from stepscope.recordings.plot.series import EventKind, PlotEvent, PlotSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ROWS = 5
_MAX_LINES = 120  # more would be a grey wall
_MAX_TEXT = 72
_FONT_SIZE = 7.0
_INCHES_PER_LETTER = 0.058  # average at that font size, with some slack
_GLYPHS: dict[EventKind, str] = {"knobs": "◆", "mark": "▼", "pause": "‖", "lost": "?"}


class Label(NamedTuple):
    """Where the text of an event is written: in which row, and whether left of the event's line."""

    event: PlotEvent
    row: int
    is_left: bool


def draw_events(
    drawing: "Figure",
    series: PlotSeries,
    colours: axes.FigureColours,
    across: tuple[float, float],
    down: tuple[float, float, float],
) -> int:
    """Draw the lines and labels of all events. Returns the number of rows of labels.

    Positions are fractions of the width or height of the plot.

    Args:
        across: left edge and width of the panels.
        down: top of the labels, bottom of the lines, height of a row.
    """
    from matplotlib.lines import Line2D

    left, width = across
    top, bottom, row_height = down
    labels, num_hidden = placed(series.events, series.duration_ns, width * drawing.get_figwidth())
    num_rows = max((label.row for label in labels), default=-1) + 1
    rows = {label.event: label.row for label in labels}
    inks = {
        "knobs": colours.knob,
        "mark": colours.ink,
        "pause": colours.muted,
        "lost": colours.breach,
    }
    for event in series.events[:_MAX_LINES]:
        x = left + width * event.time_ns / series.duration_ns
        drawing.add_artist(
            Line2D(
                (x, x),
                (bottom, top - (rows.get(event, num_rows) + 0.2) * row_height),
                color=inks[event.kind],
                linewidth=0.8,
                linestyle=(0, (4, 2)) if event.kind == "knobs" else (0, (1, 1.5)),
                zorder=-1,
            )
        )
    for label in labels:
        x = left + width * label.event.time_ns / series.duration_ns
        shift = 0.05 / drawing.get_figwidth()
        drawing.text(
            x - shift if label.is_left else x + shift,
            top - label.row * row_height,
            _text(label.event),
            parse_math=False,
            fontsize=_FONT_SIZE,
            ha="right" if label.is_left else "left",
            va="top",
            color=inks[label.event.kind],
            bbox={"facecolor": colours.paper, "edgecolor": "none", "pad": 0.6},
        )
    num_hidden += series.num_left_out
    if num_hidden:
        drawing.text(
            left + width,
            top + 0.17 / drawing.get_figheight(),
            f"and {num_hidden:,} more changes, marks or pauses without a label",
            fontsize=_FONT_SIZE,
            ha="right",
            va="top",
            color=colours.muted,
        )
    return num_rows


def placed(events: Sequence[PlotEvent], duration_ns: int, width: float) -> tuple[list[Label], int]:
    """Place the texts of events that fit into a few rows of `width` inches.

    A text is right of its line, or left of it near the right edge of the plot.

    Returns the placed labels, and how many texts did not fit.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_MAX_ROWS)]
    labels = []
    num_left_out = 0
    for event in sorted(events, key=lambda each: each.time_ns):
        length = len(_text(event)) * _INCHES_PER_LETTER
        x = event.time_ns / duration_ns * width
        is_left = x + length > width and x - length >= 0
        span = (x - length, x) if is_left else (x, x + length)
        for row, spans in enumerate(taken):
            if all(span[1] < start or span[0] > end for start, end in spans):
                spans.append(span)
                labels.append(Label(event, row, is_left))
                break
        else:
            num_left_out += 1
    return labels, num_left_out


def _text(event: PlotEvent) -> str:
    text = f"{_GLYPHS[event.kind]} {event.text}"
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 1.35, 0.58, 0.62  # margins in inches
_BETWEEN = 0.3  # inches between panels
_STEP_AXIS = 0.3  # inches from the time axis down to the step axis
_NUM_TICKS = 9  # most ticks on the step axis
_TICK_ROOM = 0.75  # share of the mean distance of ticks that a label needs
_INCHES_PER_CHARACTER = 0.06  # average for the lines of details
_STRIP = 0.16  # height of a row of labels


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
    width, height = drawing.get_size_inches()
    at_x = _LEFT / width
    num_characters = int((width - _LEFT - 0.1) / _INCHES_PER_CHARACTER)
    lines = [line[: num_characters - 1] + "…" * (len(line) >= num_characters) for line in details]
    # These texts may come from users, so they must not be parsed as formulas.
    drawing.text(
        at_x, 1 - 0.1 / height, heading, fontsize=11, fontweight="bold", va="top", parse_math=False
    )
    drawing.text(
        at_x,
        1 - 0.31 / height,
        "\n".join(lines),
        fontsize=7.5,
        linespacing=1.3,
        color=grid.colours.muted,
        va="top",
        parse_math=False,
    )
    panels = _panels(drawing, grid, _TOP + _STRIP * (len(lines) - 1))
    for panel in panels[:-1]:
        panel.tick_params(labelbottom=False)
    _step_numbers(panels[-1], grid, height * panels[-1].get_position().height)


def _panels(drawing: "Figure", grid: axes.PlotGrid, head: float) -> "list[Axes]":
    """Draw all panels from top to bottom, with the labels of events above them."""
    width, height = drawing.get_size_inches()
    left, inner = _LEFT / width, (width - _LEFT - _RIGHT) / width
    num_rows = draw_events(
        drawing,
        grid.series,
        grid.colours,
        (left, inner),
        (1 - (head - 0.1) / height, _BOTTOM / height, _STRIP / height),
    )
    has_kv = not grid.np.isnan(grid.series.kv_used).all()
    shown = {draw: share for draw, share in PANELS.items() if has_kv or draw is not kv_cache}
    top = 1 - (head + 0.12 + num_rows * _STRIP) / height
    gap = _BETWEEN / height
    free = top - _BOTTOM / height - gap * (len(shown) - 1)
    panels = []
    for draw, share in shown.items():
        rows = free * share / sum(shown.values())
        panel = drawing.add_axes((left, top - rows, inner, rows))
        panel.patch.set_alpha(0.0)  # the lines of events are below the panels
        draw(panel, grid)
        panels.append(panel)
        top -= rows + gap
    return panels


def step_ticks(columns: Sequence[tuple[int, float]], width: float) -> list[tuple[int, float]]:
    """Choose ticks for the step axis, far enough apart for their labels.

    Steps differ in duration, so steps at equal intervals are not evenly spaced on the axis.
    Instead, the axis is divided into `_NUM_TICKS` equal parts, and each part gets at most one tick,
    at a round step number.

    `columns`: (number of the first step, position) of each pixel column in which a step begins, in
    order.

    Returns (step number, position) of each tick.
    """
    steps, places = [step for step, _ in columns], [place for _, place in columns]
    stretch = width / _NUM_TICKS
    ticks: list[tuple[int, float]] = []
    for number in range(_NUM_TICKS):
        begin = bisect_left(places, places[0] + number * stretch)
        end = bisect_left(places, places[0] + (number + 1) * stretch)
        if begin == end:
            continue
        first, last = steps[begin], steps[end - 1]
        digits = len(str(max(1, last - first))) - 1
        step = -(-first // 10**digits) * 10**digits  # the first round number from there on
        at = bisect_left(steps, step)
        if at == len(steps):
            break
        place = places[at]
        if steps[at] > step:  # it is in the column before, which has several steps
            share = (step - steps[at - 1]) / (steps[at] - steps[at - 1])
            place = places[at - 1] + share * (place - places[at - 1])
        if not ticks or place - ticks[-1][1] >= stretch * _TICK_ROOM:
            ticks.append((step, place))
    return ticks


def _step_numbers(panel: "Axes", grid: axes.PlotGrid, height: float) -> None:
    """Draw an axis of step numbers below the time axis, to find a step in a replay."""
    from matplotlib.ticker import FixedLocator

    firsts = grid.series.first_steps
    found = [(int(n), x) for n, x in zip(firsts, grid.middles, strict=True) if n == n]
    ticks = step_ticks(found, grid.edges[-1] - grid.edges[0])
    axis = panel.secondary_xaxis(-_STEP_AXIS / height)
    axis.xaxis.set_major_locator(FixedLocator([x for _, x in ticks]))
    axis.set_xticklabels([f"{number:,}" for number, _ in ticks])
    for below, name in (
        (0.0, f"{grid.unit} since step {grid.series.first_step:,}"),
        (_STEP_AXIS, "step"),
    ):
        panel.annotate(
            name,
            (1.0, -below / height),
            xycoords="axes fraction",
            xytext=(6, -3.5),
            textcoords="offset points",
            va="top",
            fontsize=7.5,
        )
