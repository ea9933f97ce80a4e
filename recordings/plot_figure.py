"""A figure of a recording for a report: budget, times and memory of its steps over the same time.

It draws a `PlotSeries` with matplotlib and reads nothing else. Each panel says in its right margin
what is measured over the whole range.
"""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.recordings.export.output import missing
from stepscope.recordings.plot_events import draw_events
from stepscope.recordings.plot_series import Column, Measured, PlotSeries
from stepscope.recordings.plot_style import COLOURS, FigureColours, FigureTheme, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS_PER_INCH = 200  # of the figure's width; its pixels, too
_LOG_FROM = 25  # a largest value of so many medians is shown on a logarithmic axis
_MAX_HOLE = 6  # columns without a sample that a line goes across
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 1.35, 0.58, 0.62  # margins in inches
_STEP_AXIS = 0.3  # below that of the time
_STRIP = 0.16  # height of a row of labels
_PANELS = (("budget", 2.6), ("step", 1.4), ("itl", 1.7), ("ttft", 1.2), ("queue", 1.0), ("kv", 1.0))


def num_columns(width: float) -> int:
    """How many columns of pixels the panels of a figure of this width (in inches) have."""
    return max(50, round((width - _LEFT - _RIGHT) * COLUMNS_PER_INCH))


def figure(
    series: PlotSeries,
    heading: str,
    details: str,
    target: str,
    size: tuple[float, float],
    theme: FigureTheme,
) -> bytes:
    """The figure as a file.

    Args:
        heading, details: the two lines above it.
        target: "svg", "png" or "pdf".
        size: width and height in inches.

    Raises:
        MissingPackage: matplotlib is not there.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib", "a figure") from error
    colours = COLOURS[theme]
    look: Any = settings(colours)
    with mpl.rc_context(look):
        drawing = Figure(figsize=size, dpi=COLUMNS_PER_INCH)
        _Painter(drawing, series, colours, size).paint(heading, details)
        stream = io.BytesIO()
        # Nothing of the machine and of today is in it.
        dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        drawing.savefig(stream, format=target, metadata=dates.get(target, {}))
    return stream.getvalue()


class _Painter:
    """Draws the panels of one figure from top to bottom."""

    def __init__(
        self,
        drawing: "Figure",
        series: PlotSeries,
        colours: FigureColours,
        size: tuple[float, float],
    ) -> None:
        import numpy as np

        self._np = np
        self._figure = drawing
        self._series = series
        self._colours = colours
        self._size = size
        self._unit, self._unit_ns = _unit(series.duration_ns)
        self._edges = np.linspace(0.0, series.duration_ns / self._unit_ns, len(series.columns) + 1)
        self._middles = (self._edges[:-1] + self._edges[1:]) / 2

    def paint(self, heading: str, details: str) -> None:
        width, height = self._size
        at_x = _LEFT / width
        self._figure.text(at_x, 1 - 0.1 / height, heading, fontsize=11, fontweight="bold", va="top")
        self._figure.text(
            at_x, 1 - 0.31 / height, details, fontsize=7.5, va="top", color=self._colours.muted
        )
        axes = self._axes()
        for name, panel in axes.items():
            getattr(self, f"_{name}")(panel)
            self._mark_spans(panel)
            panel.set_xlim(self._edges[0], self._edges[-1])
            panel.margins(x=0)
        panels = list(axes.values())
        for panel in panels[:-1]:
            panel.tick_params(labelbottom=False)
        self._step_numbers(panels[-1])

    def _axes(self) -> dict[str, "Axes"]:
        """The panels under each other, the labels of events above them."""
        width, height = self._size
        shown = [(name, share) for name, share in _PANELS if name != "kv" or self._has_kv()]
        inner = (width - _LEFT - _RIGHT) / width
        num_rows = draw_events(
            self._figure,
            self._series,
            self._colours,
            (_LEFT / width, inner),
            (1 - (_TOP - 0.1) / height, _BOTTOM / height, _STRIP / height),
        )
        top = 1 - (_TOP + 0.12 + num_rows * _STRIP) / height
        bottom = _BOTTOM / height
        gap = 0.3 / height
        free = top - bottom - gap * (len(shown) - 1)
        total = sum(share for _, share in shown)
        panels: dict[str, Axes] = {}
        for name, share in shown:
            rows = free * share / total
            panel = self._figure.add_axes((_LEFT / width, top - rows, inner, rows))
            panel.patch.set_alpha(0.0)  # the lines of events are below the panels
            panels[name] = panel
            top -= rows + gap
        return panels

    def _has_kv(self) -> bool:
        return any(column.max_kv_used is not None for column in self._series.columns)

    def _step_numbers(self, panel: "Axes") -> None:
        """A second axis below that of the time, to find in a replay what is seen here."""
        from matplotlib.ticker import FixedLocator, MaxNLocator

        found = [
            (column.first_step, x)
            for column, x in zip(self._series.columns, self._middles, strict=True)
            if column.first_step is not None
        ]
        steps = [step for step, _ in found]
        numbers = [
            number
            for number in MaxNLocator(9, integer=True).tick_values(steps[0], steps[-1])
            if steps[0] <= number <= steps[-1]
        ]
        height = panel.get_position().height * self._size[1]
        axis = panel.secondary_xaxis(-_STEP_AXIS / height)
        places = self._np.interp(numbers, steps, [x for _, x in found])
        axis.xaxis.set_major_locator(FixedLocator(list(places)))
        axis.set_xticklabels([f"{number:,.0f}" for number in numbers])
        for below, name in (
            (0.0, f"{self._unit} since step {self._series.first_step:,}"),
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

    # Panels

    def _budget(self, panel: "Axes") -> None:
        colours, columns = self._colours, self._series.columns
        base = self._np.zeros(len(columns))
        parts: list[tuple[str, str, str | None, str]] = [
            ("num_decode_tokens", colours.decode, None, "decode"),
            ("num_prefill_tokens", colours.prefill, None, "prefill"),
            ("num_padded_tokens", colours.padded, "....", "padding"),
            ("num_cached_tokens", colours.cached, "//////", "cached, not spent"),
        ]
        for name, colour, hatch, label in parts:
            if not any(getattr(column, name) for column in columns) and name in (
                "num_padded_tokens",
                "num_cached_tokens",
            ):
                continue
            top = base + self._per_step(name)
            panel.fill_between(
                self._edges,
                self._stairs(base),
                self._stairs(top),
                step="post",
                linewidth=0,
                facecolor=(colour, 0.3) if hatch else colour,
                edgecolor=colour,
                hatch=hatch,
                label=label,
            )
            base = top
        if any(column.num_steps > 1 for column in columns):
            fullest = self._values(lambda column: column.max_spent_tokens or None)
            panel.step(
                self._edges,
                self._stairs(fullest),
                where="post",
                color=colours.ink,
                linewidth=0.35,
                alpha=0.7,
                label="fullest step",
            )
        budget = self._values(lambda column: column.token_budget)
        budget = self._filled(budget)
        panel.step(
            self._edges,
            self._stairs(budget),
            where="post",
            color=colours.ink,
            linewidth=1.3,
            label="budget",
        )
        panel.set_ylim(0, None)
        self._title(panel, "Tokens", "tokens a step")
        budgets = [c.token_budget for c in columns if c.token_budget is not None]
        lines = [f"{self._series.num_steps:,} steps"]
        if budgets:
            low, high = min(budgets), max(budgets)
            lines.append(f"budget {low:,}" if low == high else f"budget {low:,} to {high:,}")
        seconds = self._series.duration_ns / 1e9
        lines.append(f"out {self._series.num_output_tokens / seconds:,.0f} tok/s")
        self._margin(panel, lines)

    def _step(self, panel: "Axes") -> None:
        worst = self._values(lambda column: column.max_step_ns / 1e6 or None)
        panel.fill_between(
            self._edges,
            self._np.zeros(len(worst) + 1),
            self._stairs(self._np.nan_to_num(worst)),
            step="post",
            linewidth=0,
            facecolor=self._colours.muted,
            alpha=0.55,
        )
        panel.step(
            self._edges, self._stairs(worst), where="post", color=self._colours.ink, linewidth=0.7
        )
        self._scale(panel, self._series.step)
        self._title(panel, "Step time", "ms")
        self._margin(panel, _figures(self._series.step, None))

    def _itl(self, panel: "Axes") -> None:
        middle = self._values(
            lambda column: None if column.itl is None else column.itl.percentiles(50)[0] / 1e6
        )
        worst = self._values(
            lambda column: None if column.itl is None else column.itl.largest / 1e6
        )
        self._latency(panel, self._series.itl, self._series.slo.itl_ms, worst, middle)
        self._title(panel, "Inter-token latency (ITL)", "ms")

    def _ttft(self, panel: "Axes") -> None:
        worst = self._values(
            lambda column: None if column.max_ttft_ns is None else column.max_ttft_ns / 1e6
        )
        self._latency(panel, self._series.ttft, self._series.slo.ttft_ms, worst, None)
        self._title(panel, "Time to first token (TTFT)", "ms")

    def _latency(
        self, panel: "Axes", measured: Measured, slo_ms: float, worst: Any, middle: Any
    ) -> None:
        """The worst of each column; those beyond the service level stand out by shape too."""
        np, colours = self._np, self._colours
        with np.errstate(invalid="ignore"):
            late = worst > slo_ms
        kept = ~np.isnan(worst) & ~late
        if middle is not None:
            panel.vlines(
                self._middles, middle, worst, color=colours.decode, linewidth=0.5, alpha=0.45
            )
            panel.plot(
                self._middles,
                self._bridged(middle),
                color=colours.decode,
                linewidth=1.1,
                label="median",
            )
        panel.plot(
            self._middles[kept],
            worst[kept],
            linestyle="none",
            marker="o",
            markersize=1.6 if middle is not None else 3.0,
            markeredgewidth=0,
            color=colours.decode,
            label="longest" if middle is not None else "first token",
        )
        panel.plot(
            self._middles[late],
            worst[late],
            linestyle="none",
            marker="^",
            markersize=3.6,
            markeredgewidth=0,
            color=colours.breach,
            label="beyond",
        )
        self._scale(panel, measured, slo_ms)
        panel.axhline(
            slo_ms,
            color=colours.breach,
            linewidth=0.9,
            linestyle=(0, (4, 2)),
            label=f"SLO {slo_ms:,g} ms",
        )
        self._margin(panel, _figures(measured, slo_ms))

    def _queue(self, panel: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        waiting = self._filled(self._values(lambda column: column.max_waiting))
        running = self._filled(self._values(lambda column: column.max_running))
        panel.fill_between(
            self._edges,
            self._np.zeros(len(waiting) + 1),
            self._stairs(self._np.nan_to_num(waiting)),
            step="post",
            linewidth=0,
            facecolor=self._colours.waiting,
            label="waiting",
        )
        panel.step(
            self._edges,
            self._stairs(running),
            where="post",
            color=self._colours.running,
            linewidth=1.1,
            label="running",
        )
        panel.set_ylim(0, None)
        panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        self._title(panel, "Requests", "count")
        most = [
            max((getattr(column, name) or 0 for column in self._series.columns), default=0)
            for name in ("max_running", "max_waiting")
        ]
        self._margin(panel, [f"running max {most[0]:,}", f"waiting max {most[1]:,}"])

    def _kv(self, panel: "Axes") -> None:
        used = self._filled(self._values(lambda column: _percent(column.max_kv_used)))
        cached = self._filled(self._values(lambda column: _percent(column.kv_cached)))
        panel.fill_between(
            self._edges,
            0,
            self._stairs(used),
            step="post",
            linewidth=0,
            facecolor=self._colours.held,
            label="held by requests",
        )
        panel.fill_between(
            self._edges,
            self._stairs(used),
            self._stairs(used + cached),
            step="post",
            linewidth=0,
            facecolor=(self._colours.cached, 0.2),
            edgecolor=self._colours.cached,
            hatch="//////",
            label="cached, free",
        )
        preempted = self._np.array([column.num_preempted > 0 for column in self._series.columns])
        if preempted.any():
            panel.plot(
                self._middles[preempted],
                self._np.full(int(preempted.sum()), 108.0),
                linestyle="none",
                marker="x",
                markersize=3.5,
                markeredgewidth=1.0,
                color=self._colours.breach,
                label="preemption",
            )
        panel.set_ylim(0, 116)
        panel.set_yticks((0, 50, 100))
        self._title(panel, "KV cache", "% blocks")
        known = used[~self._np.isnan(used)]
        lines = [f"held max {known.max():.0f}%"] if len(known) else []
        if self._series.num_preempted:
            word = "preemption" if self._series.num_preempted == 1 else "preemptions"
            lines.append(f"{self._series.num_preempted:,} {word}")
        self._margin(panel, lines)

    # What panels share

    def _values(self, value: Callable[[Column], float | None]) -> Any:
        """One number a column, NaN where there is none."""
        found = [value(column) for column in self._series.columns]
        return self._np.array([self._np.nan if each is None else each for each in found])

    def _per_step(self, name: str) -> Any:
        return self._values(
            lambda column: getattr(column, name) / column.num_steps if column.num_steps else 0
        )

    def _stairs(self, values: Any) -> Any:
        """With the last one twice, for the right edge of its column."""
        return self._np.append(values, values[-1:])

    def _filled(self, values: Any) -> Any:
        """What is not known is as it was before: between two steps nothing changes."""
        last = self._np.nan
        filled = values.copy()
        for place, value in enumerate(values):
            if self._np.isnan(value):
                filled[place] = last
            else:
                last = value
        return filled

    def _bridged(self, values: Any) -> Any:
        """With straight lines over short holes; a long one is none to draw a line across."""
        np = self._np
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            return values
        places = np.arange(len(values))
        after = np.searchsorted(known, places).clip(0, len(known) - 1)
        before = (np.searchsorted(known, places, side="right") - 1).clip(0)
        is_short = known[after] - known[before] <= _MAX_HOLE
        return np.where(is_short, np.interp(places, known, values[known]), values)

    def _scale(self, panel: "Axes", measured: Measured, slo_ms: float | None = None) -> None:
        """From zero, or logarithmic where the largest would press all others to the floor."""
        samples = measured.samples
        if not samples.count:
            panel.set_ylim(0, 2 * (slo_ms or 1.0))
            return
        middle, largest = samples.percentiles(50)[0] / 1e6, samples.largest / 1e6
        if middle > 0 and largest > _LOG_FROM * middle:
            panel.set_yscale("log")
            panel.set_ylim(middle / 3, max(largest, slo_ms or 0.0) * 1.6)
            panel.yaxis.set_minor_formatter(lambda value, _: "")
        else:
            panel.set_ylim(0, max(largest, 1.1 * (slo_ms or 0.0)) * 1.08)

    def _title(self, panel: "Axes", title: str, unit: str) -> None:
        is_log = panel.get_yscale() == "log"
        panel.set_title(title, loc="left", fontweight="bold", pad=3)
        panel.set_ylabel(f"{unit}, log" if is_log else unit)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        handles, labels = panel.get_legend_handles_labels()
        if handles:
            panel.legend(
                handles,
                labels,
                loc="lower right",
                bbox_to_anchor=(1.0, 0.98),
                ncols=len(handles),
                borderpad=0.1,
                handlelength=1.4,
                handletextpad=0.4,
                columnspacing=1.2,
            )

    def _margin(self, panel: "Axes", lines: list[str]) -> None:
        room = panel.get_position().height * self._size[1] * 72  # in points
        panel.annotate(
            "\n".join(lines),
            (1.0, 1.0),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="top",
            fontsize=max(5.0, min(7.5, room / max(1, len(lines)) / 1.5)),
            linespacing=1.4,
            color=self._colours.ink,
        )

    def _mark_spans(self, panel: "Axes") -> None:
        """Pauses of the operator."""
        for start_ns, end_ns in self._series.pauses:
            panel.axvspan(
                start_ns / self._unit_ns,
                end_ns / self._unit_ns,
                facecolor=self._colours.muted,
                alpha=0.18,
                linewidth=0,
            )


def _figures(measured: Measured, slo_ms: float | None) -> list[str]:
    """Percentiles in words."""
    samples = measured.samples
    if not samples.count:
        return ["no samples"]
    found = samples.percentiles(50, 95, 99)
    lines = [
        f"{name} {_ms(value)}"
        for name, value in zip(("p50", "p95", "p99", "max"), (*found, samples.largest), strict=True)
    ]
    within = measured.within_slo
    if slo_ms is not None and within is not None:
        # Never a 100 % that hides a breach.
        kept = min(within, 0.9999) if within < 1 else 1.0
        lines.append(f"{kept:.2%} within")
    return lines


def _ms(value_ns: int) -> str:
    value = value_ns / 1e6
    digits = 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _unit(duration_ns: int) -> tuple[str, float]:
    """Of the time axis."""
    if duration_ns < 2e9:
        return "ms", 1e6
    if duration_ns < 600e9:
        return "s", 1e9
    return ("min", 60e9) if duration_ns < 3 * 3600e9 else ("h", 3600e9)
