"""The budget chart: prefill tokens of each step against the token budget, decodes below.

It has two scales, because fifty decodes among 8,192 tokens would fill less than a cell. The upper
rows show prefill *tokens* up to the budget line. One row below shows which steps decoded; its label
is the number of *decodes* at the cursor. The budget line is dotted where no prefill covers it; a
solid line is the largest step that can run in a CUDA graph.
Padding, which a static batch spends on no request, is drawn dashed on top of the prefill.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from stepscope.recordings.state.limits import LIMITS
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.chart_columns import ChartColumn
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import labelled
from stepscope.tui.views.lines import Line, Run, framed
from stepscope.tui.views.theme import LEVELS, LIMIT_LETTERS

_RUNS = re.compile(
    "(?P<prefill>[▓▁▂▃▄▅▆▇]+)|(?P<decode>━+)|(?P<idle>[·╌]+)|(?P<mark>[◆▼]+)"
    "|(?P<preempted>✗+)|(?P<muted>[0-9:.,?─]+)|(?P<text> +)"
    "|(?P<caution>[▒╍]+)"
)
_COLOURED_LIMITS = ("budget", "seats", "kv", "paused")  # others share a colour
_LIMITS_HEIGHT = 9  # least height of a panel with a row for what limited each step
_MARKS = (  # of several in a column, the first in this list is shown
    ("is_lost", "?"), ("has_preemption", "✗"), ("has_knob_change", "◆"), ("has_mark", "▼"),
    ("has_breach", "!"),
)  # fmt: skip
_STRETCH = 20  # columns from one time label to the next
_AXIS_RUNS = re.compile(
    r"(?P<frame>[─┴]+)|(?P<mark>[◆▼]+)|(?P<preempted>✗+)|(?P<breach>![\d.,]+ m?s|!+)"
    "|(?P<muted>[^─┴◆▼✗!]+)"
)


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    """Return the panel, `width` x `height` with its frame; labels in the `gutter` on its left."""
    has_limits = height >= _LIMITS_HEIGHT and not frame.is_summed_up
    num_rows = height - 4 - has_limits  # frame, decodes, axis
    columns = [each for each in frame.columns if each is not None]
    budget = max((each.token_budget or 0 for each in columns), default=0)
    most = max((each.num_prefill_tokens for each in columns), default=0)
    scale, what = (budget, "budget") if budget else (most or 1, "most")
    labels = [_named(what, scale, gutter - 2), *[""] * (num_rows - 1)]
    labels[-1] = "prefill tok" if num_rows > 1 else labels[-1]
    if num_rows >= 4:
        labels[num_rows // 2] = fmt.count(scale / 2)
    bars = _bars(frame, scale, num_rows)
    ceiling = (frame.state.info and frame.state.info.max_graph_tokens) or scale
    row = num_rows + -ceiling * num_rows // scale  # 0, under the budget's label: none
    if bars and row > 0:
        labels[row] = _named("graph", ceiling, gutter - 2)
        bars[row] = bars[row].replace(" ", "─")
    rows = zip(labels, bars, strict=False)
    decodes = "".join([_decode_cell(column) for column in frame.columns])
    axis = labelled(frame.unit if frame.view.axis == "step" else "time", gutter, "┤")
    body: list[Line] = [(*labelled(x, gutter), *_runs(cells, frame, _RUNS)) for x, cells in rows]
    body.append((*labelled(_decodes(frame, gutter - 2), gutter), *_runs(decodes, frame, _RUNS)))
    if has_limits:
        body.append((*labelled(_limit_at_cursor(frame, gutter - 2), gutter), *_limits(frame)))
    body.append((*axis, *_runs(_axis(frame), frame, _AXIS_RUNS)))
    return framed(body, width, height, _title(frame), _legend(frame))


def _named(what: str, number: int, room: int) -> str:
    # A number that is cut off reads as another.
    return fmt.first_fitting((f"{what} {fmt.count(number)}", f"{what} {fmt.short(number)}"), room)


def _bars(frame: Frame, scale: int, num_rows: int) -> list[str]:
    bars = []
    before: int | None = None
    for column in frame.columns:
        if column is None or column.is_lost:
            bars.append(" " * num_rows)
            continue
        budget = column.token_budget
        is_change = column.has_knob_change and before is not None and before != budget
        padded = column.num_padded_tokens
        bar = _bar(column.num_prefill_tokens, padded, budget, is_change, scale, num_rows)
        bars.append(re.sub("[▓▁▂▃▄▅▆▇]", "▒", bar) if column.is_open else bar)
        before = budget
    return ["".join(cells) for cells in zip(*bars, strict=True)]


def _decode_cell(column: ChartColumn | None) -> str:
    if column is None or not column.num_decode_rows:
        return " "
    return "╍" if column.is_open else "━"


def _limits(frame: Frame) -> Line:
    """Return the row of limits: a band with its name where a limit held for long, else letters."""
    runs: list[Run] = []
    limits = [None if column is None else column.limit for column in frame.columns]
    for limit, group in groupby(limits):
        num = len(list(group))
        glyph = " " if limit is None else LIMIT_LETTERS[limit]
        text, style = glyph * num, "idle" if limit == "work" else "text"
        if limit is not None and limit != "work":
            style = f"limit_{limit}" if limit in _COLOURED_LIMITS else "limit_other"
            text = f" {limit} ".ljust(num, "–") if num >= len(limit) + 2 else text
        runs.append((text, style))
    return with_cursor(tuple(runs), frame.cursor_column)


def _limit_at_cursor(frame: Frame, room: int) -> str:
    """Return what limited the step at the cursor in full: the row's letters need no legend."""
    summary = frame.summary
    if summary is None or summary.limit is None:
        return "limit"
    name = "none" if (limit := LIMITS[summary.limit]) == "work" else limit
    return fmt.first_fitting((f"limit {name}", name, "limit"), room)


def _decodes(frame: Frame, room: int) -> str:
    """Return the label of the decode row: how many decoded at the cursor, in `room` cells."""
    name = "output" if frame.is_summed_up else "decodes"
    if frame.summary is None:
        return name
    rows, tokens = frame.summary.num_decode_rows, frame.summary.num_decode_tokens
    number = fmt.count(tokens if rows is None else rows)  # of tokens, drafts would count, too
    return fmt.first_fitting((f"{name} {number}", f"dec {number}", number), room)


def _legend(frame: Frame) -> Line:
    if frame.imported is not None:
        return _IMPORTED_LEGEND
    chunks = "▓▒" if frame.view.zoom == 1 else "▓"  # a column of several steps joins them
    return ((chunks, "prefill"), ("prefill ", "muted"), *_LEGEND)


_LEGEND: Line = (
    ("━", "decode"), ("decode ", "muted"),
    ("░", "cached"), ("cached ", "muted"),
    ("·", "idle"), ("idle ", "muted"),
    ("◆", "mark"), ("knob ", "muted"),
    ("✗", "preempted"), ("preempt ", "muted"),
    ("!", "breach"), ("late ", "muted"),
    ("●", "finished"), ("end", "muted"),
)  # fmt: skip
# A file of another tool tells how many tokens there were, not what was done for them.
_IMPORTED_LEGEND: Line = (("▓", "prefill"), ("prompt ", "muted"), ("━", "decode"),
                          ("output ", "muted"), *_LEGEND[-4:])  # fmt: skip


def _title(frame: Frame) -> Line:
    zoom = frame.view.zoom
    if frame.view.axis == "time":
        unit = f"1 col = {10 * zoom} ms"
    else:
        unit = f"1 col = {fmt.plural(zoom, 'step')}" + (", worst of them" if zoom > 1 else "")
    name, flying = "steps: token budget", frame.in_flight
    if frame.is_summed_up:
        name = "tokens in each second" if frame.imported is None else "tokens in each record"
        unit = unit.replace("step", "record")
    knee = "" if frame.knee is None else f" · knee {frame.knee:,}"
    runs = "" if flying is None else f"  step {flying.step:,} still runs "
    return ((name, "title"), (knee, "text"), (f" ({unit})", "muted"), (runs, "caution"))


@lru_cache(maxsize=4096)
def _bar(
    num_prefill_tokens: int,
    num_padded_tokens: int,
    budget: int | None,
    is_change: bool,
    scale: int,
    num_rows: int,
) -> str:
    eighths = min(8 * num_rows, round(num_prefill_tokens / scale * num_rows * 8))
    if num_prefill_tokens:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    bar = "▓" * full + (LEVELS[rest - 1] if rest else "")
    if num_padded_tokens:
        top = min(num_rows, -(-(num_prefill_tokens + num_padded_tokens) * num_rows // scale))
        bar += "╌" * (top - len(bar))
    cells = list(bar.ljust(num_rows))
    if budget is not None:
        line = max(0, min(num_rows - 1, -(-budget * num_rows // scale) - 1))
        if cells[line] == " ":
            cells[line] = "·"
        if is_change:
            cells[line] = "◆"
    cells.reverse()
    return "".join(cells)


def _axis(frame: Frame) -> str:
    cells = ["─"] * len(frame.columns)
    _put_marks(cells, frame)
    put = _put_step_ticks if frame.view.axis == "step" else _put_time_ticks
    put(cells, frame)
    return "".join(cells)


def _put_marks(cells: list[str], frame: Frame) -> None:
    """Write the glyphs of events, and how long a wide step took, where there is room."""
    columns = frame.columns
    for x, column in enumerate(columns):
        # A long step fills several columns; only the first is marked.
        before = columns[x - 1] if x else None
        if column is None or _is_same_step(before, column):
            continue
        if column.is_wide:
            took = fmt.with_ms(column.longest_ns / 1e6)
            held = columns[x : x + 1 + len(took)]
            if len(held) > len(took) and all(_is_same_step(column, each) for each in held):
                cells[x + 1 : x + 1 + len(took)] = took
        cells[x] = next((glyph for name, glyph in _MARKS if getattr(column, name)), cells[x])


def _is_same_step(before: ChartColumn | None, column: ChartColumn | None) -> bool:
    if before is None or column is None:
        return False
    is_held = before.is_pending and column.is_pending and before.last == column.last
    return is_held or before[:2] == column[:2]


def _put_label(cells: list[str], x: int, label: str) -> bool:
    """Write a tick and its label into the axis, unless they would cover an event's glyph."""
    tick = f"┴{label}"
    is_free = cells[x : x + len(tick)] == ["─"] * len(tick)
    if is_free:
        cells[x : x + len(tick)] = tick
    return is_free


def _put_step_ticks(cells: list[str], frame: Frame) -> None:
    """Write step numbers at round steps, or at the next step where there is room."""
    interval, before, is_due = 20 * frame.view.zoom, None, False
    for x, column in enumerate(frame.columns):
        if column is None or column.is_open or column.last == before:
            continue
        before = column.last
        step = -(-column.first // interval) * interval
        is_due = is_due or step <= column.last
        label = f"{step if step <= column.last else column.first:,}"
        is_due = is_due and not _put_label(cells, x, label)


def _put_time_ticks(cells: list[str], frame: Frame) -> None:
    """Write times, or only their seconds, into the axis where they cover no event."""
    for first in range(0, len(cells), _STRETCH):
        last = min(first + _STRETCH, len(cells))
        for part in (slice(None), slice(5, None)):
            times = ((x, label[part]) for x, label in _times(frame, first, last))
            if any(x + 1 + len(at) <= last and _put_label(cells, x, at) for x, at in times):
                break


def _times(frame: Frame, first: int, last: int) -> Iterator[tuple[int, str]]:
    """Yield the columns of a stretch with their times, hh:mm:ss.s; none if they are unknown."""
    for x in range(first, last):
        column = frame.columns[x]
        start_ns = None if column is None else column.start_ns
        wall_ns = None if start_ns is None else frame.history.wall_ns(start_ns)
        if wall_ns is not None:
            yield x, f"{fmt.clock(wall_ns)}.{wall_ns // 100_000_000 % 10}"


def _runs(text: str, frame: Frame, pattern: "re.Pattern[str]") -> Line:
    runs = [(match.group(), match.lastgroup or "text") for match in pattern.finditer(text)]
    return with_cursor(tuple(runs), frame.cursor_column)


def with_cursor(line: Line, at: int | None) -> Line:
    if at is None:
        return line
    runs: list[Run] = []
    for text, style in line:
        if 0 <= at < len(text):
            runs += [(text[:at], style), (text[at], f"{style}+cursor"), (text[at + 1 :], style)]
        else:
            runs.append((text, style))
        at -= len(text)
    return tuple(run for run in runs if run[0])
