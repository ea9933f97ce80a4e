"""Plots a recording: budget, latencies and memory of its steps over time.

It lays out panels below each other and draws them with matplotlib, from a `PlotSeries` alone.
Events (knob changes, marks, pauses, losses) are lines across all panels, with labels above.

A panel is one function. A pixel column may cover several steps: then the solid shape shows their
mean or median, and the pale shape (or a point) their maximum, because an average alone would hide a
stall.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.recordings.export.output import MissingPackage
from stepscope.recordings.plot import axes
from stepscope.recordings.plot.series import EventKind, PlotSeries
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.lazy_numpy import np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MANY_LATE = 150  # with more late points, their marks are smaller


def budget(panel: "Axes", grid: axes.PlotGrid) -> None:
    """Draw the tokens of a step, by prefill, decode and so on, against the token budget."""
    colours, series = grid.colours, grid.series
    num_steps = series.counts["num_steps"]
    if (num_steps > 1).any():
        pale: Any = {"facecolor": (colours.prefill, 0.3), "label": "fullest step"}
        panel.stairs(series.most["num_spent_tokens"], grid.edges, fill=True, **pale)
    base = np.zeros(series.num_columns)
    for name, colour, hatch, label in (
        ("num_decode_tokens", colours.decode, None, "decode"),
        ("num_prefill_tokens", colours.prefill, None, "prefill"),
        ("num_padded_tokens", colours.padded, "....", "padding"),
        ("num_cached_tokens", colours.cached, "//////", "cached, not spent"),
    ):
        if hatch and not series.counts[name].any():
            continue
        top = base + series.counts[name] / np.maximum(num_steps, 1)
        face = (colour, 0.3) if hatch else colour
        look: Any = {"facecolor": face, "edgecolor": colour, "hatch": hatch, "label": label}
        panel.stairs(top, grid.edges, baseline=base, fill=True, **look)
        base = top
    budgets = series.budget
    look = {"color": colours.ink, "linewidth": 1.3, "label": "budget"}
    panel.stairs(grid.filled(budgets), grid.edges, baseline=None, **look)
    panel.set_ylim(0, None)
    lines = [f"{series.sums.num_records:,} steps"]
    known = budgets[~np.isnan(budgets)]
    if len(known):
        low, high = int(known.min()), int(known.max())
        lines.append(f"budget {low:,}" if low == high else f"budget {low:,} to {high:,}")
    num_tokens = series.sums.num_output_tokens
    if num_tokens is not None:
        lines.append(f"out {num_tokens / series.duration_ns * 1e9:,.0f} tok/s")
    axes.finish(panel, grid, "Tokens", "tokens a step", lines)


def step_time(panel: "Axes", grid: axes.PlotGrid) -> None:
    measured = grid.series.waits.of["step"]
    unit, unit_ns = axes.unit_of(measured)
    longest, median = (each / unit_ns for each in grid.spread(grid.series.steps))
    shade: Any = (grid.colours.muted, 0.5)
    panel.stairs(longest, grid.edges, fill=True, facecolor=shade, label="longest")
    look: Any = {"color": grid.colours.ink, "linewidth": 0.9, "label": "median"}
    panel.stairs(median, grid.edges, baseline=None, **look)
    axes.set_scale(panel, measured, unit_ns)
    axes.finish(panel, grid, "Step time", unit, axes.figures(measured))


def itl(panel: "Axes", grid: axes.PlotGrid) -> None:
    longest, median = grid.spread(grid.series.itls)
    measured, bound_ms = grid.series.waits.of["itl"], grid.series.slo.itl_ms
    _latency(panel, grid, "Inter-token latency (ITL)", measured, bound_ms, longest, median)


def ttft(panel: "Axes", grid: axes.PlotGrid) -> None:
    series = grid.series
    measured, bound_ms = series.waits.of["ttft"], series.slo.ttft_ms
    _latency(panel, grid, "Time to first token (TTFT)", measured, bound_ms, series.ttft_ns)


def _latency(
    panel: "Axes",
    grid: axes.PlotGrid,
    title: str,
    measured: Distribution,
    slo_ms: float,
    longest_ns: Any,
    median_ns: Any = None,
) -> None:
    colours = grid.colours
    unit, unit_ns = axes.unit_of(measured)
    longest, bound = longest_ns / unit_ns, slo_ms * 1e6 / unit_ns
    is_late = np.nan_to_num(longest) > bound
    is_kept = ~np.isnan(longest) & ~is_late
    if median_ns is not None:
        median = median_ns / unit_ns
        look: dict[str, Any] = {"color": colours.decode}
        panel.vlines(grid.middles, median, longest, linewidth=0.5, alpha=0.45, **look)
        panel.plot(grid.middles, grid.bridged(median), linewidth=1.1, label="median", **look)
    small, large = 3.0 if median_ns is None else 1.6, 2.6 if is_late.sum() > _MANY_LATE else 3.6
    kept = "first token" if median_ns is None else "longest"
    for places, marker, size, colour, label in (
        (is_kept, "o", small, colours.decode, kept),
        (is_late, "^", large, colours.breach, "beyond"),
    ):
        look = {"marker": marker, "markersize": size, "color": colour, "label": label}
        look |= {"linestyle": "none", "markeredgewidth": 0}
        panel.plot(grid.middles[places], longest[places], **look)
    axes.set_scale(panel, measured, unit_ns, bound)
    look = {"color": colours.breach, "linewidth": 0.9, "linestyle": (0, (4, 2))}
    panel.axhline(bound, label=f"SLO {bound:,g} {unit}", **look)
    axes.finish(panel, grid, title, unit, axes.figures(measured))


def requests(panel: "Axes", grid: axes.PlotGrid) -> None:
    from matplotlib.ticker import MaxNLocator

    colours = grid.colours
    waiting, running = (grid.filled(grid.series.most[f"num_{k}"]) for k in ("waiting", "running"))
    panel.stairs(waiting, grid.edges, fill=True, facecolor=colours.waiting, label="waiting")
    look: Any = {"color": colours.running, "linewidth": 1.1, "label": "running"}
    panel.stairs(running, grid.edges, baseline=None, **look)
    panel.set_ylim(0, None)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    lines = [f"running max {np.nanmax(running):,.0f}", f"waiting max {np.nanmax(waiting):,.0f}"]
    axes.finish(panel, grid, "Requests", "count", lines)


def kv_cache(panel: "Axes", grid: axes.PlotGrid) -> None:
    series, colours = grid.series, grid.colours
    held, cached = (100 * grid.filled(each) for each in (series.kv_used, series.kv_cached))
    panel.stairs(held, grid.edges, fill=True, facecolor=colours.held, label="held by requests")
    pale: Any = {"facecolor": (colours.cached, 0.2), "edgecolor": colours.cached}
    pale |= {"hatch": "//////", "label": "cached, free", "baseline": held}
    panel.stairs(held + cached, grid.edges, fill=True, **pale)
    lines = [f"held max {np.nanmax(held):.0f}%"]
    if num_preempted := series.sums.num_preempted:
        is_out = series.num_preempted > 0
        look: dict[str, Any] = {"marker": "x", "markersize": 3.5, "markeredgewidth": 1.0}
        look |= {"linestyle": "none", "color": colours.breach, "label": "preemption"}
        panel.plot(grid.middles[is_out], np.full(int(is_out.sum()), 108.0), **look)
        word = "preemption" if num_preempted == 1 else "preemptions"
        lines.append(f"{num_preempted:,} {word}")
    panel.set_ylim(0, 116)
    panel.set_yticks((0, 50, 100))
    axes.finish(panel, grid, "KV cache", "% blocks", lines)


# Panel -> its share of the height.
PANELS: Mapping[Callable[["Axes", axes.PlotGrid], None], float] = {
    budget: 2.6, step_time: 1.4, itl: 1.7, ttft: 1.2, requests: 1.0, kv_cache: 1.0,
}  # fmt: skip


_MAX_ROWS = 5  # of labels
_MAX_LINES = 120  # more would be a grey wall
_MAX_TEXT = 72
_GLYPHS: dict[EventKind, str] = {"knobs": "◆", "mark": "▼", "pause": "‖", "lost": "?"}
# In inches; widths of letters are averages with some slack.
_LETTER, _SMALL_LETTER = 0.06, 0.058
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.75, 1.35, 0.58, 0.62  # margins
_BETWEEN = 0.3  # between panels
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

    `size`: width and height in inches.

    Raises MissingPackage: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("matplotlib", "a figure") from error
    grid = axes.PlotGrid(series, axes.COLOURS[theme])
    look: Any = axes.settings(grid.colours)
    # Leave out the date, so that equal figures are equal files.
    dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    stream = io.BytesIO()
    with mpl.rc_context(look), warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes; do not print a warning for that.
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from", UserWarning)
        drawing = Figure(figsize=size, dpi=axes.DPI)
        _paint(drawing, grid, heading, details)
        drawing.savefig(stream, format=target, metadata=dates.get(target, {}))
    return stream.getvalue()


def _paint(drawing: "Figure", grid: axes.PlotGrid, heading: str, details: Sequence[str]) -> None:
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
    has_kv = not np.isnan(grid.series.kv_used).all()
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
            _step_numbers(panel, grid)


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


def _step_numbers(panel: "Axes", grid: axes.PlotGrid) -> None:
    """Write below each time the first step of that column."""
    firsts, edges = grid.filled(grid.series.first_steps), grid.edges

    def label(value: float, _: float) -> str:
        column = int(edges.searchsorted(value, "right")) - 1
        return f"{value:,g}\n{int(firsts[max(0, min(column, len(firsts) - 1))]):,}"

    panel.xaxis.set_major_formatter(label)
    name = f"{grid.unit} since step {grid.series.first_step:,}\nstep"
    look: Any = {"textcoords": "offset points", "va": "top", "fontsize": 7.5}
    panel.annotate(name, (1.0, 0.0), xycoords="axes fraction", xytext=(6, -3.5), **look)
