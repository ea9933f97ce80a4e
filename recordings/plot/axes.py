"""Helpers of all panels: scales, units, headings, and percentiles in the margin.

`PlotGrid`: the columns of a `PlotSeries` as arrays along the time axis. Needs numpy. The colours
are those of Okabe and Ito ("Color Universal Design", 2008), which stay distinct with protanopia,
deuteranopia and tritanopia. Adjacent shapes also differ in lightness or hatch, so that a plot
printed in grey is readable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepscope.recordings.plot.series import PlotSeries
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.lazy_numpy import np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 200

FigureTheme: TypeAlias = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class FigureColours:
    paper: str
    ink: str
    muted: str
    grid: str
    prefill: str = "#e69f00"
    decode: str = "#0072b2"
    cached: str = "#56b4e9"
    padded: str = "#999999"
    breach: str = "#d55e00"
    knob: str = "#aa4499"
    running: str = "#0072b2"
    waiting: str = "#b0b0b0"
    held: str = "#009e73"


COLOURS: dict[FigureTheme, FigureColours] = {
    "light": FigureColours(paper="#ffffff", ink="#1a1a1a", muted="#555555", grid="#dddddd"),
    "dark": FigureColours(
        paper="#0e1116", ink="#e6e9ee", muted="#9aa4b2", grid="#2b323d", decode="#4fb3ff",
        running="#4fb3ff", cached="#8ecdf3", breach="#ff7a3d", knob="#d78bd0", held="#35c29a",
        waiting="#6b7480",
    ),
}  # fmt: skip


def settings(colours: FigureColours) -> dict[str, Any]:
    """Return matplotlib's rcParams, with which a plot looks the same on any machine."""
    texts = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor")
    papers = ("axes.facecolor", "figure.facecolor", "savefig.facecolor")
    return {
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "axes.titlesize": 8.5,
        **dict.fromkeys(("font.size", "axes.labelsize"), 8.0),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7.5),
        **dict.fromkeys((*texts, "ytick.labelcolor"), colours.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), colours.muted),
        # No event line crosses the text of a legend.
        **dict.fromkeys((*papers, "legend.facecolor", "legend.edgecolor"), colours.paper),
        "legend.frameon": True, "legend.framealpha": 1.0, "hatch.linewidth": 0.5,
        "axes.linewidth": 0.7, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
        "grid.color": colours.grid, "grid.linewidth": 0.6, "pdf.fonttype": 42,
        "svg.hashsalt": "stepscope",  # the same recording makes the same file
    }  # fmt: skip


_MAX_HOLE = 0.015  # share of the width; lines bridge shorter holes without samples


class PlotGrid:
    """The data and the time axis that all panels of a plot share."""

    def __init__(self, series: PlotSeries, colours: FigureColours) -> None:
        self.series = series
        self.colours = colours
        # The unit of the time axis, and its nanoseconds.
        self.unit, self.unit_ns = _time_unit(series.duration_ns)
        # Positions of the edges and middles of the pixel columns, in `unit`.
        end = series.duration_ns / self.unit_ns
        self.edges: Any = np.linspace(0.0, end, series.num_columns + 1)
        self.middles: Any = (self.edges[:-1] + self.edges[1:]) / 2

    def spread(self, waits: Sequence[Distribution]) -> tuple[Any, Any]:
        """Return the longest and the median latency of each column; NaN without any."""
        known = [
            (each.largest, *each.percentiles(50)) if each.count else (np.nan, np.nan)
            for each in waits
        ]
        longest, median = np.array(known, float).T
        return longest, median

    def filled(self, values: Any) -> Any:
        """Replace each NaN by the known value before it, as nothing changes between two steps."""
        places = np.where(np.isnan(values), 0, np.arange(len(values)))
        return values[np.maximum.accumulate(places)]

    def bridged(self, values: Any) -> Any:
        """Replace short runs of NaN by straight lines between known values. Long runs stay NaN."""
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            return values
        places = np.arange(len(values))
        after = np.searchsorted(known, places).clip(0, len(known) - 1)
        before = (np.searchsorted(known, places, side="right") - 1).clip(0)
        is_short = known[after] - known[before] <= _MAX_HOLE * len(values)
        return np.where(is_short, np.interp(places, known, values[known]), values)


def _time_unit(duration_ns: int) -> tuple[str, float]:
    if duration_ns < 2e9:
        return "ms", 1e6
    if duration_ns < 600e9:
        return "s", 1e9
    return ("min", 60e9) if duration_ns < 3 * 3600e9 else ("h", 3600e9)


_LOG_FROM = 25  # the axis is logarithmic if the maximum is more than so many medians
_SECONDS_FROM_NS = 10e9


def unit_of(measured: Distribution) -> tuple[str, float]:
    """Return the unit for a latency and its nanoseconds: ms, or s if the largest value is long."""
    return ("s", 1e9) if measured.largest >= _SECONDS_FROM_NS else ("ms", 1e6)


def set_scale(
    panel: "Axes", measured: Distribution, unit_ns: float, bound: float | None = None
) -> None:
    """Set the y axis: linear from zero, or logarithmic if the maximum would flatten the rest."""
    if not measured.count:
        panel.set_ylim(0, 2 * (bound or 1.0))
        return
    median, largest = measured.percentiles(50)[0] / unit_ns, measured.largest / unit_ns
    if median > 0 and largest > _LOG_FROM * median:
        panel.set_yscale("log")
        panel.set_ylim(median / 3, max(largest, bound or 0.0) * 1.6)
        panel.yaxis.set_minor_formatter(lambda value, _: "")
    else:
        panel.set_ylim(0, max(largest, 1.1 * (bound or 0.0)) * 1.08)


def figures(measured: Distribution) -> list[str]:
    """Return lines of text with the percentiles of a latency over the whole plotted range."""
    if not measured.count:
        return ["no samples"]
    found = (*measured.percentiles(50, 95, 99), measured.largest)
    names = ("p50", "p95", "p99", "max")
    lines = [f"{name} {_time(value)}" for name, value in zip(names, found, strict=True)]
    within = measured.spread().within_slo
    if within is not None:
        # Do not round up to 100 %, which would hide a breach.
        lines.append(f"{min(within, 0.9999) if within < 1 else 1.0:.2%} within")
    return lines


def _time(value_ns: int) -> str:
    if value_ns >= _SECONDS_FROM_NS:
        return f"{value_ns / 1e9:,.1f} s"
    value = value_ns / 1e6
    digits = 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def finish(panel: "Axes", grid: PlotGrid, title: str, unit: str, lines: list[str]) -> None:
    """Add heading and legend to a panel, shade pauses, and write `lines` in its right margin."""
    panel.set_title(title, loc="left", fontweight="bold", pad=3)
    panel.set_ylabel(f"{unit}, log" if panel.get_yscale() == "log" else unit)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    handles, labels = panel.get_legend_handles_labels()
    where: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "ncols": len(handles)}
    where |= {"borderpad": 0.1, "handlelength": 1.4, "handletextpad": 0.4, "columnspacing": 1.2}
    panel.legend(handles, labels, **where)
    room = panel.get_window_extent().height / DPI * 72  # in points
    look: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
    look["fontsize"] = max(5.0, min(7.5, room / len(lines) / 1.5))
    panel.annotate("\n".join(lines), (1.0, 1.0), xytext=(6, 0), linespacing=1.4, **look)
    shade: Any = {"facecolor": (grid.colours.muted, 0.18), "linewidth": 0}
    for start_ns, end_ns in grid.series.pauses:
        panel.axvspan(start_ns / grid.unit_ns, end_ns / grid.unit_ns, **shade)
    panel.set_xlim(grid.edges[0], grid.edges[-1])
