"""Mirrored charts of two compared runs, A and B, on one axis with one cursor.

The bars of A grow up from the axis, those of B down. The budget charts show prefill tokens against
the token budget of each run. Next to the axis they show which columns decoded and what happened in
them. The wait charts below show the longest wait for a token that ended in each column; both runs
have the same scale.
`matrix`, `others`: the figures of a comparison, each with both values and the better run.
"""

import math
from collections.abc import Sequence
from itertools import chain

from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.figures import ComparedFigure, Verdict
from stepscope.recordings.compare.points import KNOB, LATE, LOST, MARKED, PREEMPTED, StepPoint
from stepscope.recordings.compare.side_requests import RequestRun
from stepscope.recordings.figures import KINDS
from stepscope.recordings.session.waits import BESIDE_PREFILL, DECODE_ONLY
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts.budget_chart import with_cursor
from stepscope.tui.views.frame import compare_text as words
from stepscope.tui.views.frame.compare_choices import ComparePage
from stepscope.tui.views.framed_panels import column_chart, labelled
from stepscope.tui.views.lines import Field, Line, Run, bounded, clean, facts, fitted, joined, whole

_LABEL = 7
_BLOCK = 22  # cells of a percentile, with the vertical line before it
_RANKS = {50: "p50", 95: "p95", 99: "p99", 100: "max", None: "in SLO"}
_PARTS = {DECODE_ONLY: "├decode", BESIDE_PREFILL: "└beside"}
_SERVED = {"ttft": "served_ttft", "itl": "served_itl"}  # as the front end sent them, if it tells
_BY_NEED = (99, 50, 100, None, 95)  # without room, the last of these is left out first
MARKS: dict[Verdict, tuple[str, str]] = {
    "a": ("A", "caution"),
    "b": ("B", "good"),
    "alike": ("=", "muted"),
    "unclear": ("?", "muted"),
}
# What the marks behind each pair of values say.
KEY: Line = (
    ("A→B  ", "muted"), ("B", "good"), (" or ", "muted"), ("A", "caution"),
    (" is better ", "muted"), ("=", "muted"), (" alike ", "muted"), ("?", "muted"),
    (" not sure", "muted"),
)  # fmt: skip


def matrix(found: Comparison, width: int, *, with_parts: bool) -> list[Line]:
    """Return the table of latencies: a line per kind, a column for each percentile that fits.

    With parts, two lines below ITL are for gaps without a prefill beside them and with one.
    """
    kept = _BY_NEED[: max(1, (width - _LABEL) // _BLOCK)]
    ranks = {rank: name for rank, name in _RANKS.items() if rank in kept}
    head = [(("│", "frame"), (f"{name:^{_BLOCK - 1}}", "muted")) for name in ranks.values()]
    lines: list[Line] = [((f"{'ms':>{_LABEL - 1}} ", "muted"), *chain.from_iterable(head))]
    for kind, label in KINDS.items():
        if kind == "e2e" or kind in _SERVED.values():
            continue  # the sum of the others; the table has it
        rows: dict[str, str] = {kind: " " + label.removesuffix(" time")}
        if kind == "itl" and with_parts:
            rows |= _PARTS
        if kind in _SERVED:
            rows[_SERVED[kind]] = "└served"
        for row, name in rows.items():
            figures = {figure.rank: figure for figure in found.figures if figure.kind == row}
            if row in _SERVED.values() and all(f.a is f.b is None for f in figures.values()):
                continue
            blocks = [(("│", "frame"), *_block(figures.get(rank))) for rank in ranks]
            lines.append(((f"{name:<{_LABEL}}", "strong"), *chain.from_iterable(blocks)))
    return lines


def _block(figure: ComparedFigure | None) -> Line:
    room, width = _BLOCK - 1, 13
    if figure is None:
        return ((" " * room, "text"),)
    mark, style = _mark(figure)
    is_said = figure.verdict in words.SIDES
    factor = f"{'' if figure.rank is None else _factor(figure):>{room - width - 2}}"
    shown = (f"{words.change(figure):>{width}} ", "strong" if is_said else "text")
    return (shown, (mark, style), (factor, style if is_said else "muted"))


def _factor(figure: ComparedFigure) -> str:
    return words.times(figure) if figure.verdict in ("a", "b", "differs") else ""


def _mark(figure: ComparedFigure) -> Run:
    if figure.verdict == "differs":
        return "▲" if (figure.b or 0) > (figure.a or 0) else "▼", "muted"
    return MARKS.get(figure.verdict, (" ", "muted"))


def others(found: Comparison, width: int, height: int) -> list[Line]:
    """Return the figures that are not latencies, in as many columns as fit into `width`."""
    num = max(1, width // 38)
    # First those with a better run, last those without values in both runs.
    rank = {"a": 0, "b": 0, "unclear": 1, "differs": 1, "alike": 2, "unknown": 4}
    figures = [each for each in found.figures if each.kind is None]
    figures.sort(key=lambda f: rank[f.verdict] + (1 if not f.a and not f.b else 0))
    entries = [_entry(figure, width // num) for figure in figures[: num * height]]
    rows = (entries[first : first + num] for first in range(0, len(entries), num))
    return [tuple(chain.from_iterable(row)) for row in rows]


def _entry(figure: ComparedFigure, room: int) -> Line:
    mark, style = _mark(figure)
    tail, shown = f" {mark}{_factor(figure):>6} ", words.change(figure)
    label = f" {clean(figure.label, 16)}"
    gap = " " * max(1, room - len(label) - len(shown) - len(tail))
    is_said = figure.verdict in words.SIDES
    return facts(label + gap, (shown, "strong" if is_said else "text"), (tail, style))


GUTTER = 11
MIN_HEIGHT = 5  # the axis, and for each side one row of events and one of budget
LEGEND: Line = (
    ("▓", "prefill"), ("prefill of budget ", "muted"),
    ("━", "decode"), ("decode ", "muted"),
    ("!", "breach"), ("late ", "muted"),
    ("✗", "preempted"), ("preempt ", "muted"),
    ("◆", "mark"), ("knob", "muted"),
)  # fmt: skip
# Of several events in a column only one is shown: the first in this list.
_HAPPENED = (
    (PREEMPTED, "✗", "preempted"),
    (KNOB, "◆", "mark"),
    (MARKED, "▼", "mark"),
    (LATE, "!", "breach"),
    (LOST, "?", "muted"),
)


def draw(page: ComparePage, slo_itl_ms: float, height: int) -> list[Line]:
    """Return the budget charts and, if there is room, the wait charts of both runs."""
    if height < MIN_HEIGHT:
        return []
    wait_rows = 0 if height < 10 else max(1, (height - 4) // 5)
    budget_rows = (height - 3 - (2 * wait_rows + 1 if wait_rows else 0)) // 2
    return _budgets(page, budget_rows) + (_waits(page, wait_rows, slo_itl_ms) if wait_rows else [])


def _budgets(page: ComparePage, num_rows: int) -> list[Line]:
    lines: list[Line] = []
    for number, letter in enumerate("AB"):
        columns, is_down = page.columns[number], letter == "B"
        scale, label = _budget_scale(columns)
        tokens = [None if p is None else p.num_prefill_tokens for p in columns]
        styles = ["prefill"] * len(columns)
        bars = column_chart(tokens, num_rows, scale, styles, is_down=is_down, full="▓")
        happened = [_happened(point) for point in columns]
        name = f"{letter} decode"
        if page.align == "request" and page.pair is not None:
            happened = _life(page, page.pair[number], happened)
            name = f"{letter} request"
        rows = _rows(page, bars, {0: label}, is_down)
        events = _row(page, name, joined(happened))
        lines += [events, *rows] if is_down else [*rows, events, _axis(page)]
    return lines


def _rows(page: ComparePage, bars: list[Line], labels: dict[int, str], is_down: bool) -> list[Line]:
    """Return the rows of a chart; `labels` count from the end that is away from the axis."""
    away = range(len(bars) - 1, -1, -1) if is_down else range(len(bars))
    return [_row(page, labels.get(y, ""), bar) for y, bar in zip(away, bars, strict=True)]


def _budget_scale(columns: Sequence[StepPoint | None]) -> tuple[int, str]:
    points = [point for point in columns if point is not None]
    if budget := max((point.token_budget or 0 for point in points), default=0):
        return budget, f"of {budget:,}"
    most = max((point.num_prefill_tokens for point in points), default=0)
    return max(1, most), f"tok {fmt.short(most)}"


def _happened(point: StepPoint | None) -> Run:
    if point is None:
        return " ", "text"
    for flag, glyph, style in _HAPPENED:
        if point.flags & flag:
            return glyph, style
    return ("━", "decode") if point.num_decode_tokens else ("·", "idle")


def _life(page: ComparePage, run: RequestRun, happened: Sequence[Run]) -> list[Run]:
    """Return the row of one request from arrival to end: its events, and where it waited."""
    first_ns = math.inf if run.ttft_ns is None else run.ttft_ns
    gone_ns = math.inf if run.end_ns is None else run.end_ns - run.arrival_ns
    cells: list[Run] = []
    for x, cell in enumerate(happened):
        start = page.start + x * page.width
        end = start + page.width
        if end <= 0 or start > gone_ns:
            cells.append((" ", "text"))
        elif gone_ns < end:
            cells.append(("●", "finished"))
        elif cell[0] not in "━· ":
            cells.append(cell)
        else:
            cells.append(("·", "idle") if end <= first_ns else ("━", "decode"))
    return cells


def _waits(page: ComparePage, num_rows: int, slo_itl_ms: float) -> list[Line]:
    known = [p.longest_us or 0 for side in page.columns for p in side if p is not None]
    scale = max(known, default=0) or 1
    label = fmt.with_ms(scale / 1000)
    lines: list[Line] = []
    for letter, columns in zip("AB", page.columns, strict=True):
        is_down = letter == "B"
        waits = [None if p is None else p.longest_us for p in columns]
        styles = ["breach" if (wait or 0) > slo_itl_ms * 1000 else "text" for wait in waits]
        bars = column_chart(waits, num_rows, scale, styles, is_down=is_down)
        labels = {num_rows - 1: f"{letter} waits"} if num_rows > 1 else {}
        lines += _rows(page, bars, labels | {0: label}, is_down)
        if not is_down:
            lines.append(_row(page, "", (("─" * len(columns), "frame"),), "┤"))
    return lines


def _axis(page: ComparePage) -> Line:
    num = len(page.columns[0])
    cells = ["─"] * num
    for x in range(0, num - 8, 20):
        label = f"┴{offset_text(page, page.start + x * page.width)}"
        if x + len(label) <= num:
            cells[x : x + len(label)] = label
    name = {"time": "time", "step": "steps", "request": "arrival"}[page.align]
    styled = [(cell, "frame" if cell in "─┴" else "muted") for cell in cells]
    return _row(page, name, joined(styled), "┤")


def offset_text(page: ComparePage, offset: int) -> str:
    """Return an offset on the axis that both runs share, as a short text."""
    if page.align == "step":
        return f"{offset:,}"
    seconds = offset / 1e9
    if page.width < 100_000_000 and abs(seconds) < 100:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if abs(seconds) < 600 else fmt.short_span(seconds)


def _row(page: ComparePage, label: str, cells: Line, edge: str = "│") -> Line:
    return (*labelled(label, GUTTER, edge), *with_cursor(cells, page.cursor_column))


def cursor_line(
    page: ComparePage, letter: str, point: StepPoint | None, slo_itl_ms: float, width: int
) -> Line:
    """Return a line on one run: what its engine did in the steps at the cursor."""
    mark = "▶" if page.focus == letter.lower() else " "
    head = facts((f"{mark}{letter} ", "strong"), (f"{offset_text(page, page.cursor):>8} ", "muted"))
    if point is None:
        return fitted((*head, ("no step here", "muted")), width)
    is_one = point.last == point.first
    steps = f"step {point.first:,}" if is_one else f"steps {point.first:,}–{point.last:,}"
    wait_ms = None if point.longest_us is None else point.longest_us / 1000
    waited = bounded(fmt.with_ms(wait_ms), wait_ms, slo_itl_ms, " ")
    prefill = f"{point.num_prefill_tokens:,}/{fmt.count(point.token_budget)}"
    fields = (
        Field(0, (*head, (f"{steps:<18} ", "text"))),
        Field(5, () if is_one else facts("up to ")),
        Field(1, ((f"{fmt.with_ms(point.duration_us / 1000):>8}", "strong"),)),
        Field(3, facts("  prefill ", (prefill, "prefill"))),
        Field(4, facts("  decode ", (f"{point.num_decode_tokens}", "decode"))),
        Field(2, facts("  wait ", waited)),
        Field(6, facts("  queue ", fmt.count(point.num_waiting))),
    )
    return fitted(whole(fields, width), width)
