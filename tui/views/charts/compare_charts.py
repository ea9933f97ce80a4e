"""Mirrored charts of two compared runs, A and B, on one axis with one cursor.

The bars of A grow up from the axis, those of B down. The budget charts show prefill tokens against
the token budget of each run. Next to the axis they show which columns decoded and what happened in
them. The wait charts below show the longest wait for a token that ended in each column; both runs
have the same scale.
`matrix`, `others`: the figures of a comparison, each with both values and the better run.
"""

from collections.abc import Sequence

from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.figures import ComparedFigure, Verdict
from stepscope.recordings.compare.side.points import KNOB, LATE, LOST, MARKED, PREEMPTED, StepPoint
from stepscope.recordings.compare.side.requests import RequestRun
from stepscope.recordings.figures.table import KINDS
from stepscope.recordings.session.waits import BESIDE_PREFILL, DECODE_ONLY
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts.budget_chart import labelled, with_cursor
from stepscope.tui.views.frame import compare_text as words
from stepscope.tui.views.frame.compare_choices import ComparePage
from stepscope.tui.views.framed_panels import column_chart
from stepscope.tui.views.lines import Field, Line, Run, clean, fitted, joined, whole

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
    "differs": (" ", "muted"),
    "unknown": (" ", "muted"),
}
_ALIKE: Line = (
    ("=", "muted"), (" alike ", "muted"), ("?", "muted"), (" not sure", "muted"),
)  # fmt: skip


def key(found: Comparison) -> Line:
    """Return the legend of the marks behind each pair of values (better run, alike, not sure)."""
    if found.different_work is not None and not found.better("a") + found.better("b"):
        return (("A→B  ", "muted"), ("▼▲", "text"), (" lower, higher in B ", "muted"), *_ALIKE)
    return (
        ("A→B  ", "muted"),
        ("B", "good"), (" or ", "muted"), ("A", "caution"), (" is better ", "muted"), *_ALIKE,
    )  # fmt: skip


def matrix(found: Comparison, width: int, *, with_parts: bool) -> list[Line]:
    """Return the table of latencies: a line per kind, a column for each percentile that fits.

    With parts, two lines below ITL are for gaps without a prefill beside them and with one.
    """
    num = max(1, (width - _LABEL) // _BLOCK)
    kept = set(_BY_NEED[:num])
    ranks = [(rank, name) for rank, name in _RANKS.items() if rank in kept]
    head: list[Run] = [(f"{'ms':>{_LABEL - 1}} ", "muted")]
    for _, name in ranks:
        head += [("│", "frame"), (f"{name:^{_BLOCK - 1}}", "muted")]
    lines: list[Line] = [tuple(head)]
    rows: list[tuple[str, list[ComparedFigure]]] = []
    for kind, label in KINDS.items():
        if kind == "e2e" or kind in _SERVED.values():
            continue  # the sum of the others; the table has it
        of_kind = [figure for figure in found.figures if figure.kind == kind]
        rows.append((" " + label.removesuffix(" time"), of_kind))
        if kind == "itl" and with_parts:
            rows += [
                (label, [figure for figure in found.figures if figure.kind == part])
                for part, label in _PARTS.items()
            ]
        served = [figure for figure in found.figures if figure.kind == _SERVED.get(kind, "")]
        if any(figure.a is not None or figure.b is not None for figure in served):
            rows.append(("└served", served))
    for label, of_row in rows:
        figures = {figure.rank: figure for figure in of_row}
        line: list[Run] = [(f"{label:<{_LABEL}}", "strong")]
        for rank, _ in ranks:
            line += [("│", "frame"), *_block(figures.get(rank))]
        lines.append(tuple(line))
    return lines


def _block(figure: ComparedFigure | None) -> Line:
    room = _BLOCK - 1
    if figure is None:
        return ((" " * room, "text"),)
    mark, style = _mark(figure)
    is_said = figure.verdict in ("a", "b")
    shown = words.change(figure)
    width = 13
    is_clear = figure.verdict in ("a", "b", "differs") or words.is_large(figure)
    has_factor = figure.rank is not None and is_clear
    factor = words.times(figure) if has_factor else ""
    return (
        (f"{shown:>{width}} ", "strong" if is_said else "text"),
        (mark, style),
        (f"{factor:>{room - width - 2}}", style if is_said else "muted"),
    )


def _mark(figure: ComparedFigure) -> Run:
    if figure.verdict == "differs":
        return "▲" if (figure.b or 0) > (figure.a or 0) else "▼", "muted"
    return MARKS[figure.verdict]


def others(found: Comparison, width: int, height: int) -> list[Line]:
    """Return the figures that are not latencies, in as many columns as fit into `width`."""
    num = max(1, width // 38)
    room = width // num
    # First those with a better run, last those without values in both runs.
    rank = {"a": 0, "b": 0, "unclear": 1, "differs": 1, "alike": 2, "unknown": 4}
    figures = [each for each in found.figures if each.kind is None]
    figures.sort(key=lambda f: rank[f.verdict] + (1 if not f.a and not f.b else 0))
    figures = figures[: num * height]
    lines: list[Line] = []
    for first in range(0, len(figures), num):
        line: list[Run] = []
        for figure in figures[first : first + num]:
            line += _entry(figure, room)
        lines.append(tuple(line))
    return lines


def _entry(figure: ComparedFigure, room: int) -> Line:
    mark, style = _mark(figure)
    is_said = figure.verdict in ("a", "b")
    factor = words.times(figure) if figure.verdict in ("a", "b", "differs") else ""
    tail = f" {mark}{factor:>6} "
    label = clean(figure.label, 16)
    shown = words.change(figure)
    gap = room - len(label) - len(shown) - len(tail) - 1
    return (
        (f" {label}", "muted"),
        (" " * max(1, gap), "muted"),
        (shown, "strong" if is_said else "text"),
        (tail, style),
    )


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
_Cell = tuple[str, str]


def draw(page: ComparePage, slo_itl_ms: float, height: int) -> list[Line]:
    """Return the budget charts and, if there is room, the wait charts of both runs."""
    if height < MIN_HEIGHT:
        return []
    wait_rows = 0 if height < 10 else max(1, (height - 4) // 5)
    budget_rows = (height - 3 - (2 * wait_rows + 1 if wait_rows else 0)) // 2
    lines = _budgets(page, budget_rows)
    if wait_rows:
        lines += _waits(page, wait_rows, slo_itl_ms)
    return lines


def _budgets(page: ComparePage, num_rows: int) -> list[Line]:
    lines: list[Line] = []
    for number, letter in enumerate("AB"):
        columns, is_down = page.columns[number], letter == "B"
        scale, label = _budget_scale(columns)
        tokens = [None if p is None else float(p.num_prefill_tokens) for p in columns]
        styles = ["prefill"] * len(columns)
        bars = column_chart(tokens, num_rows, scale, styles, is_down=is_down, full="▓")
        happened = [_happened(point) for point in columns]
        name = f"{letter} decode"
        if page.align == "request" and page.pair is not None:
            happened = _life(page, page.pair[number], happened)
            name = f"{letter} {page.pair.name}"
        rows = _rows(page, bars, {0: label}, is_down)
        events = _row(page, name, joined(happened))
        lines += [events, *rows] if is_down else [*rows, events, _axis(page)]
    return lines


def _rows(page: ComparePage, bars: list[Line], labels: dict[int, str], is_down: bool) -> list[Line]:
    """Return the rows of a chart; `labels` count from the end that is away from the axis."""
    away = range(len(bars) - 1, -1, -1) if is_down else range(len(bars))
    return [_row(page, labels.get(y, ""), bar) for y, bar in zip(away, bars, strict=True)]


def _budget_scale(columns: Sequence[StepPoint | None]) -> tuple[int, str]:
    budget = max((p.token_budget or 0 for p in columns if p is not None), default=0)
    if budget:
        return budget, f"of {budget:,}"
    most = max((p.num_prefill_tokens for p in columns if p is not None), default=0)
    return max(1, most), f"tok {fmt.short(most)}"


def _happened(point: StepPoint | None) -> _Cell:
    if point is None:
        return " ", "text"
    for flag, glyph, style in _HAPPENED:
        if point.flags & flag:
            return glyph, style
    return ("━", "decode") if point.num_decode_tokens else ("·", "idle")


def _life(page: ComparePage, run: RequestRun, happened: Sequence[_Cell]) -> list[_Cell]:
    """Return the row of one request from arrival to end: its events, and where it waited."""
    first_ns = run.ttft_ns
    end_ns = None if run.end_ns is None else run.end_ns - run.arrival_ns
    cells: list[_Cell] = []
    for x, cell in enumerate(happened):
        start = page.start + x * page.width
        if start + page.width <= 0 or (end_ns is not None and start > end_ns):
            cells.append((" ", "text"))
        elif end_ns is not None and start <= end_ns < start + page.width:
            cells.append(("●", "finished"))
        elif cell[0] not in "━· ":
            cells.append(cell)
        elif first_ns is None or start + page.width <= first_ns:
            cells.append(("·", "idle"))
        else:
            cells.append(("━", "decode"))
    return cells


def _waits(page: ComparePage, num_rows: int, slo_itl_ms: float) -> list[Line]:
    known = [p.longest_us or 0 for side in page.columns for p in side if p is not None]
    scale = max(known, default=0) or 1
    label = fmt.with_ms(scale / 1000)
    lines: list[Line] = []
    for number, letter in enumerate("AB"):
        columns, is_down = page.columns[number], letter == "B"
        waits = [
            None if p is None or p.longest_us is None else float(p.longest_us) for p in columns
        ]
        late = [wait is not None and wait > slo_itl_ms * 1000 for wait in waits]
        styles = ["breach" if each else "text" for each in late]
        bars = column_chart(waits, num_rows, scale, styles, is_down=is_down)
        labels = {num_rows - 1: f"{letter} waits"} if num_rows > 1 else {}
        lines += _rows(page, bars, labels | {0: label}, is_down)
        if not is_down:
            lines.append(_row(page, "", (("─" * len(columns), "frame"),), "┤"))
    return lines


def _axis(page: ComparePage) -> Line:
    """Return the line of the axis: ticks, each labelled with its offset from where runs align."""
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
    return f"{seconds:.1f}s" if abs(seconds) < 600 else fmt.duration(seconds)


def _row(page: ComparePage, label: str, cells: Line, edge: str = "│") -> Line:
    return (*labelled(label, GUTTER, edge), *with_cursor(cells, page.cursor_column))


def cursor_lines(page: ComparePage, slo_itl_ms: float, width: int) -> list[Line]:
    """Return one line for each run: what its engine did in the steps at the cursor."""
    return [
        fitted(_cursor_line(page, letter, page.points[number], slo_itl_ms, width), width)
        for number, letter in enumerate("AB")
    ]


def _cursor_line(
    page: ComparePage, letter: str, point: StepPoint | None, slo_itl_ms: float, width: int
) -> Line:
    mark = "▶" if page.focus == letter.lower() else " "
    at = offset_text(page, page.cursor)
    head: Line = ((f"{mark}{letter} ", "strong"), (f"{at:>8} ", "muted"))
    if point is None:
        return (*head, ("no step here", "muted"))
    steps = f"step {point.first:,}"
    if point.last != point.first:
        steps = f"steps {point.first:,}–{point.last:,}"
    wait_ms = None if point.longest_us is None else point.longest_us / 1000
    is_late = wait_ms is not None and wait_ms > slo_itl_ms
    late = "!" if is_late else " "
    most: Line = (("up to ", "muted"),) if point.last != point.first else ()
    took = fmt.with_ms(point.duration_us / 1000)
    prefill = f"{point.num_prefill_tokens:,}/{fmt.count(point.token_budget)}"
    waited: Run = (f"{fmt.with_ms(wait_ms)}{late}", "breach" if is_late else "text")
    fields = (
        Field(0, (*head, (f"{steps:<18} ", "text"))),
        Field(5, most),
        Field(1, ((f"{took:>8}", "strong"),)),
        Field(3, (("  prefill ", "muted"), (prefill, "prefill"))),
        Field(4, (("  decode ", "muted"), (f"{point.num_decode_tokens}", "decode"))),
        Field(2, (("  wait ", "muted"), waited)),
        Field(6, (("  queue ", "muted"), (fmt.count(point.num_waiting), "text"))),
    )
    return whole(fields, width)
