"""`frontier_figure`: plots TTFT against ITL for each value of a knob."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.plot.style import COLOURS, FigureColours, FigureTheme, rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (8.0, 4.4)  # inches
_TITLES = ("median", "p99")
_CLOSE = 0.04  # points closer than this share of the maximum share a label


class Between(NamedTuple):
    """A value in milliseconds, and the interval around it."""

    value: float
    low: float
    high: float


class FrontierPoint(NamedTuple):
    """Predicted (ITL, TTFT) for one value of the knob, at the median and p99; None: unknown."""

    label: str
    median: tuple[Between, Between] | None
    p99: tuple[Between, Between] | None
    is_best: bool  # no other value has both p99 lower


def frontier_figure(
    points: Sequence[FrontierPoint],
    recorded: Sequence[tuple[float, float] | None],
    heading: str,
    details: str,
    target: str,
    theme: FigureTheme = "light",
) -> bytes:
    """Plot TTFT against ITL, one point for each value of a knob, at the median and at p99.

    Error bars are the intervals. A point is filled if no other value has both p99 ITL and p99 TTFT
    lower.

    `recorded`: (ITL, TTFT) in milliseconds of the recording, at the median and at p99.

    Returns the bytes of the file.

    Raises MissingPackage: matplotlib is not installed.
    """
    colours = COLOURS[theme]

    def paint(drawing: "Figure") -> None:
        drawing.text(0.08, 0.97, heading, fontsize=11, fontweight="bold", va="top")
        drawing.text(0.08, 0.915, details, fontsize=7.5, color=colours.muted, va="top")
        for index, title in enumerate(_TITLES):
            panel = drawing.add_axes((0.08 + 0.48 * index, 0.12, 0.4, 0.7))
            at_rank = [point.p99 if index else point.median for point in points]
            _draw(panel, points, at_rank, recorded[index], colours)
            panel.set_title(title, loc="left")

    return rendered(paint, target, SIZE, theme)


def _draw(
    panel: "Axes",
    points: Sequence[FrontierPoint],
    at_rank: Sequence[tuple[Between, Between] | None],
    recorded: tuple[float, float] | None,
    colours: FigureColours,
) -> None:
    panel.set_xlabel("time between tokens (ITL), ms")
    panel.set_ylabel("time to first token (TTFT), ms")
    panel.grid(visible=True, axis="both")
    known = [(point, each) for point, each in zip(points, at_rank, strict=True) if each is not None]
    panel.plot(
        [itl.value for _, (itl, _) in known],
        [ttft.value for _, (_, ttft) in known],
        color=colours.waiting,
        linewidth=1.0,
        zorder=1,
    )
    for point, (itl, ttft) in known:
        panel.errorbar(
            itl.value,
            ttft.value,
            xerr=[[itl.value - itl.low], [itl.high - itl.value]],
            yerr=[[ttft.value - ttft.low], [ttft.high - ttft.value]],
            fmt="o",
            markersize=5.0,
            color=colours.decode,
            markerfacecolor=colours.decode if point.is_best else colours.paper,
            ecolor=colours.waiting,
            elinewidth=0.7,
        )
    for label, place in _labels(
        [(point.label, itl.value, ttft.value) for point, (itl, ttft) in known]
    ):
        panel.annotate(label, place, xytext=(5, 5), textcoords="offset points", fontsize=7.5)
    if recorded is not None:
        panel.plot(*recorded, "X", color=colours.breach, markersize=7.0, label="recorded")
        panel.legend(loc="best")
    panel.set_ylim(bottom=0.0)
    panel.set_xlim(left=0.0)


def _labels(points: Sequence[tuple[str, float, float]]) -> list[tuple[str, tuple[float, float]]]:
    """Return the labels of points, each with its position.

    Points too close to each other share a label, at the position of the first of them.
    """
    widest = max((x for _, x, _ in points), default=0.0) * _CLOSE
    highest = max((y for _, _, y in points), default=0.0) * _CLOSE
    labels: list[tuple[str, tuple[float, float]]] = []
    for label, x, y in points:
        if labels and abs(x - labels[-1][1][0]) <= widest and abs(y - labels[-1][1][1]) <= highest:
            labels[-1] = f"{labels[-1][0]}, {label}", labels[-1][1]
        else:
            labels.append((label, (x, y)))
    return labels
