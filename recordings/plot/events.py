"""Draws events (knob changes, marks, pauses, losses): lines across all panels, labels above."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.plot.series import EventKind, PlotEvent, PlotSeries
from stepscope.recordings.plot.style import FigureColours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_ROWS = 5
_MAX_LINES = 120  # more would be a grey wall
_MAX_TEXT = 72
_FONT_SIZE = 7.0
_INCHES_PER_CHARACTER = 0.058  # average at that font size, with some slack
_GLYPHS: dict[EventKind, str] = {"knobs": "◆", "mark": "▼", "pause": "‖", "lost": "?"}


class Label(NamedTuple):
    """Where the text of an event is written: in which row, and whether left of the event's line."""

    event: PlotEvent
    row: int
    is_left: bool


def draw_events(
    drawing: "Figure",
    series: PlotSeries,
    colours: FigureColours,
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
        length = len(_text(event)) * _INCHES_PER_CHARACTER
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
