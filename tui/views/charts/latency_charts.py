"""The heat map of one kind of latency over time, and its histogram."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.recordings.state.series.latency_samples import Samples
from stepscope.tui.views import format as fmt
from stepscope.tui.views.lines import Line

# Bands per decade; the finest division that fits is used.
_PER_DECADE = (24, 18, 15, 12, 10, 9, 8, 7, 6, 5, 4.5, 4, 3.5, 3, 2.5, 2, 1.5, 1)
_DENSITY = " ·░▒▓█"
DENSITY_KEY: Line = (("·░▒▓█", "decode"), (" few to many ", "muted"), ("! late", "breach"))


class Counted(NamedTuple):
    """Numbers of latency samples, by latency band (above its edge in ms) and by time slice."""

    edges: list[float]  # the service level is one: a band is late as a whole, or not at all
    num_late: int  # the last so many bands are late
    cells: list[list[int]]  # by band, then by slice

    def is_late(self, band: int) -> bool:
        return band >= len(self.edges) - self.num_late


def count(
    samples: Samples,
    end_ns: int,
    window_s: float,
    num_slices: int,
    most_bands: int,
    bound_ms: float | None,  # the service level
) -> Counted:
    base_ns = (1.0 if bound_ms is None else bound_ms) * 1e6

    ranked = samples.ranked()
    assert ranked is not None
    # A sample exactly as long as the service level is not late.
    extremes = (ranked.smallest, ranked.largest)
    low, high = (math.log10(max(1, each - 1) / base_ns) for each in extremes)
    finest = (each for each in _PER_DECADE if _num_bands(low, high, each) <= most_bands)
    per_decade: float = next(finest, 1)
    while _num_bands(low, high, per_decade) > max(2, most_bands):  # one on each side of the level
        per_decade /= 2
    first, last = math.floor(low * per_decade), math.floor(high * per_decade)
    edges_ns = [base_ns * 10 ** (at / per_decade) for at in range(first, last + 1)]
    cells = _by_slice(samples, end_ns, round(window_s * 1e9), num_slices, edges_ns[1:])
    edges = [edge_ns / 1e6 for edge_ns in edges_ns]
    num_late = 0 if bound_ms is None else max(0, min(len(edges), last + 1))
    return Counted(edges, num_late, cells)


def _by_slice(
    samples: Samples, end_ns: int, extent_ns: int, num_slices: int, upper_ns: Sequence[float]
) -> list[list[int]]:
    """Return counts by band and slice; samples beyond either end are in the first or last slice."""
    cells = [[0] * num_slices for _ in range(len(upper_ns) + 1)]
    begin = 0
    for x in range(num_slices):
        end = len(samples)
        if x < num_slices - 1:  # up to the start of the next slice
            next_ns = end_ns - extent_ns - (-(x + 1) * extent_ns // num_slices)
            end = samples.num_until(next_ns - 1)
        part = samples.ranked(begin, end)
        begin = end
        if part is None:
            continue
        before = 0
        for band, edge_ns in enumerate(upper_ns):
            up_to = part.num_up_to(edge_ns)
            cells[band][x] = up_to - before
            before = up_to
        cells[-1][x] = part.count - before
    return cells


def _num_bands(low: float, high: float, per_decade: float) -> int:
    return math.floor(high * per_decade) - math.floor(low * per_decade) + 1


def heat_map(counted: Counted, window_s: float) -> list[Line]:
    """Return the heat map: a column per time slice, a row per latency band, glyphs for counts."""
    most = max(max(row) for row in counted.cells)
    lines: list[Line] = []
    for band in range(len(counted.edges) - 1, -1, -1):
        text = "".join([_dense(number, most) for number in counted.cells[band]])
        lines.append((*_label(counted, band), (text, _style(counted, band))))
    room = len(counted.cells[0])
    return [*lines, ((f"{'ms':>6} ", "muted"), ("┤", "frame"), (_axis(room, window_s), "muted"))]


def spread(counted: Counted, width: int) -> list[Line]:
    """Return a horizontal histogram with the bands of the heat map."""
    counts = [sum(row) for row in counted.cells]
    total, most, room = sum(counts), max(counts), max(4, width - 23)
    lines: list[Line] = []
    for band in range(len(counts) - 1, -1, -1):
        cells = "█" * round(counts[band] / most * room) or ("▌" if counts[band] else "")
        said = f" {fmt.short(counts[band]):>5} {counts[band] / total:>6.1%}"
        bar = (f"{cells:<{room}}", _style(counted, band))
        lines.append((*_label(counted, band), bar, (said, "muted")))
    return lines


def _label(counted: Counted, band: int) -> Line:
    is_late = counted.is_late(band)
    return (
        (f"{fmt.milliseconds(counted.edges[band]):>6} ", "muted"),
        ("!" if is_late else "│", "breach" if is_late else "frame"),
    )


def _style(counted: Counted, band: int) -> str:
    return "breach" if counted.is_late(band) else "decode"


def _dense(number: int, most: int) -> str:
    if not number:
        return " "
    share = math.log1p(number) / math.log1p(max(1, most))
    return _DENSITY[min(len(_DENSITY) - 1, 1 + int(share * (len(_DENSITY) - 1.001)))]


def _axis(room: int, window_s: float) -> str:
    axis = ["─"] * room
    for quarter in (4, 3, 2, 1):
        label = f"┴-{window_s * quarter / 4:g}s"
        x = room - room * quarter // 4
        if x + len(label) <= room:
            axis[x : x + len(label)] = label
    return "".join(axis)
