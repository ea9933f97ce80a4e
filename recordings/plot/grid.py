"""`PlotGrid`: the columns of a `PlotSeries` as arrays along the time axis. Needs numpy."""

from collections.abc import Callable
from typing import Any

from stepscope.recordings.plot.series import PlotColumn, PlotSeries
from stepscope.recordings.plot.style import FigureColours

_MAX_HOLE = 0.015  # share of the width; lines bridge shorter holes without samples


class PlotGrid:
    """The data and the time axis that all panels of a plot share."""

    def __init__(self, series: PlotSeries, colours: FigureColours) -> None:
        import numpy as np

        self.np: Any = np
        self.series = series
        self.colours = colours
        # The unit of the time axis, and its nanoseconds.
        self.unit, self.unit_ns = _time_unit(series.duration_ns)
        # Positions of the edges and middles of the pixel columns, in `unit`.
        self.edges: Any = np.linspace(
            0.0, series.duration_ns / self.unit_ns, len(series.columns) + 1
        )
        self.middles: Any = (self.edges[:-1] + self.edges[1:]) / 2

    def values(self, value: Callable[[PlotColumn], float | None]) -> Any:
        """Return an array with one number per column; NaN where `value` returns None."""
        found = [value(column) for column in self.series.columns]
        return self.np.array([self.np.nan if each is None else each for each in found], float)

    def stairs(self, values: Any) -> Any:
        """Return one value for each edge of the columns, by repeating the last value."""
        return self.np.append(values, values[-1:])

    def filled(self, values: Any) -> Any:
        """Replace each NaN by the known value before it, as nothing changes between two steps."""
        np = self.np
        places = np.where(np.isnan(values), 0, np.arange(len(values)))
        return values[np.maximum.accumulate(places)]

    def bridged(self, values: Any) -> Any:
        """Replace short runs of NaN by straight lines between known values. Long runs stay NaN."""
        np = self.np
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
