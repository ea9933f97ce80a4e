"""Mirrored charts of two compared runs, A and B, on one axis with one cursor.

The bars of A grow up from the axis, those of B down. The budget charts show prefill tokens against
the token budget of each run. Next to the axis they show which columns decoded and what happened in
them. The wait charts below show the longest wait for a token that ended in each column; both runs
have the same scale.
"""

from collections.abc import Sequence

from stepscope.recordings.compare.side.points import KNOB, LATE, LOST, MARKED, PREEMPTED, StepPoint
from stepscope.recordings.compare.side.requests import RequestRun
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts.budget_chart import labelled, with_cursor
from stepscope.tui.views.frame.compare_picture import ComparePage
from stepscope.tui.views.framed_panels import column_chart
from stepscope.tui.views.lines import Field, Line, Run, fitted, joined, whole

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
    """Return one line of a chart, with the cursor's column highlighted."""
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
