"""Knob changes and marks of a figure: lines across all panels, with labels above them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.plot_series import Event, PlotSeries
from stepscope.recordings.plot_style import FigureColours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_ROWS = 5
_MAX_LINES = 60  # of a kind: more are a grey wall
_MAX_TEXT = 60
_FONT_SIZE = 7.0
_INCHES_PER_CHARACTER = 0.062  # at that size, on average, and a bit more


class Label(NamedTuple):
    """Where the text of an event goes: a row, and whether it is left of its line."""

    event: Event
    is_knob: bool
    row: int
    is_left: bool


def draw_events(
    drawing: "Figure",
    series: PlotSeries,
    colours: FigureColours,
    across: tuple[float, float],
    down: tuple[float, float, float],
) -> int:
    """Lines and labels, in fractions of the figure; gives the number of rows of labels.

    Args:
        across: left edge and width of the panels.
        down: top of the labels, bottom of the lines, height of a row.
    """
    from matplotlib.lines import Line2D

    left, width = across
    top, bottom, row_height = down
    labels, num_unlabelled = placed(
        series.knob_changes, series.marks, series.duration_ns, width * drawing.get_figwidth()
    )
    num_rows = max((label.row for label in labels), default=-1) + 1
    lines = [(event, True) for event in series.knob_changes[:_MAX_LINES]]
    lines += [(event, False) for event in series.marks[:_MAX_LINES]]
    rows = {id(label.event): label.row for label in labels}
    for event, is_knob in lines:
        x = left + width * event.time_ns / series.duration_ns
        row = rows.get(id(event), num_rows)
        drawing.add_artist(
            Line2D(
                (x, x),
                (bottom, top - row * row_height - 0.2 * row_height),
                color=colours.knob if is_knob else colours.muted,
                linewidth=0.8,
                linestyle=(0, (3, 2)) if is_knob else (0, (1, 1.5)),
                zorder=-1,
            )
        )
    for label in labels:
        x = left + width * label.event.time_ns / series.duration_ns
        shift = 0.05 / drawing.get_figwidth()
        drawing.text(
            x - shift if label.is_left else x + shift,
            top - label.row * row_height,
            _text(label.event, label.is_knob),
            fontsize=_FONT_SIZE,
            ha="right" if label.is_left else "left",
            va="top",
            color=colours.knob if label.is_knob else colours.ink,
        )
    num_hidden = series.num_left_out + num_unlabelled
    if num_hidden:
        drawing.text(
            left + width,
            top + 0.12 / drawing.get_figheight(),
            f"{num_hidden:,} more knob changes and marks without a label",
            fontsize=_FONT_SIZE,
            ha="right",
            color=colours.muted,
        )
    return num_rows


def placed(
    knob_changes: Sequence[Event], marks: Sequence[Event], duration_ns: int, width: float
) -> tuple[list[Label], int]:
    """A place for as many texts as fit into a few rows of `width` inches; how many do not.

    A text is right of its line, or left of it where the figure ends.
    """
    events = [(event, True) for event in knob_changes] + [(event, False) for event in marks]
    events.sort(key=lambda each: each[0].time_ns)
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_MAX_ROWS)]
    labels = []
    num_left_out = 0
    for event, is_knob in events:
        length = len(_text(event, is_knob)) * _INCHES_PER_CHARACTER
        x = event.time_ns / duration_ns * width
        is_left = x + length > width and x - length >= 0
        span = (x - length, x) if is_left else (x, x + length)
        for row, spans in enumerate(taken):
            if all(span[1] < start or span[0] > end for start, end in spans):
                spans.append(span)
                labels.append(Label(event, is_knob, row, is_left))
                break
        else:
            num_left_out += 1
    return labels, num_left_out


def _text(event: Event, is_knob: bool) -> str:
    text = f"{'◆' if is_knob else '▼'} {event.text}"
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
