"""The fleet page: a line per engine, and notes on engines that differ from the others.

From the top: the table; the notes on what is wrong, stands out or is set differently; bars that
compare the load of engines; their load over time; the events of the engines; requests across
prefill and decode engines. Without enough room the last parts are left out.
"""

from collections.abc import Callable, Sequence

from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.fleets.fleet import LOOK_S, EngineLine
from stepscope.recordings.fleets.imbalance import FleetFigure
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import whole_life_lanes
from stepscope.tui.views.charts.fleet_columns import (
    heading,
    labels,
    looks_of_cell,
    placed,
    row,
    spark_values,
)
from stepscope.tui.views.frame.fleet_view import ColumnKey, FleetPage
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Target, bar, beside, column_chart, first_shown
from stepscope.tui.views.lines import Line, Run, clean, fitted, framed, length_of, spread
from stepscope.tui.views.pages import fleet_notes

_LOAD_ROWS = 4  # most rows of the load of each engine
_EVENTS_HEIGHT = 8  # rows kept for events, if there are as many, before the load gets any
_LEAST_ROWS = 3  # least rows of the table


def targets(frame: Frame) -> list[Target]:
    """Return a target for each engine, in the order of the table."""
    page = frame.fleet
    return [] if page is None else [Target(engine=each.name) for each in page.engines]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    """Return the whole page."""
    page = frame.fleet
    if page is None or width < 4 or height < 3:
        return [fitted((), width)] * height
    notes = fleet_notes.notes(page, width - 2)
    table_height = _table_height(page, height, len(notes))
    key = frame.key
    legend = (
        f"{key('inspect')} opens one; {key('step_back')}/{key('step_forward')} orders by another "
        f"column, {key('reverse')} reverses it"
    )
    lines = _table(page, width, table_height, ((legend, "muted"),))
    left = height - len(lines)
    if left >= 3:
        notes_height = min(left, len(notes) + 2)
        title: Line = (("what stands out", "title"),)
        lines += framed(_cut(notes, notes_height - 2), width, notes_height, title)
        left = height - len(lines)
    bars_height = len(page.lines) + 2
    if len(page.lines) > 1 and left >= bars_height:
        lines += _bars(page, width, bars_height)
        left = height - len(lines)
    num_events = len(page.picture.events)
    events_height = 0 if left < 4 or not num_events else min(left, num_events + 2)
    rows_each = (left - min(events_height, _EVENTS_HEIGHT) - 2) // max(1, len(page.lines))
    if len(page.lines) > 1 and rows_each >= 2:
        lines += _loads(page, width, min(rows_each, _LOAD_ROWS))
        left = height - len(lines)
    if events_height:
        lines += _events(page, width, min(left, events_height))
        left = height - len(lines)
    if page.picture.lives and left >= 3:
        lines += _lives(page, width, left)
    lines += [fitted((), width)] * (height - len(lines))
    return lines


def header(frame: Frame, title: str, fps: float, width: int) -> list[Line]:
    """Return the header lines: how many engines are up, and sums over all of them."""
    right: Line = ((f"{fps:g}fps ", "muted"),)
    page = frame.fleet
    if page is None:
        return [spread((), right, width)]
    left: Line = ((f" {clean(title, 24)} ", "strong"), ("▐FLEET▌", "badge_live"), (" ", "text"))
    room = width - length_of(right) - 1
    return [spread(_as_many((*left, *_up(page)), _totals(page), room), right, width)]


def small(frame: Frame, width: int, height: int) -> list[Line]:
    """Return lines for a screen without room for a table: how many are up, and what stands out."""
    page = frame.fleet
    if page is None:
        return []
    first = _as_many(((" ", "text"), *_up(page)), _totals(page), width)
    return [first, *fleet_notes.notes(page, width)][:height]


def hit(frame: Frame, width: int, height: int, x: int, y: int) -> str | ColumnKey | None:
    """Return what was clicked: an engine's name, the key of a column heading, or None."""
    page = frame.fleet
    if page is None:
        return None
    table_height = _table_height(page, height, len(fleet_notes.notes(page, width - 2)))
    if y == 1:
        for place in placed(page, width - 2):
            if place.x <= x - 1 <= place.x + place.width:
                return place.column.key
    room = table_height - 3
    number = first_shown(len(page.lines), room, page.selected) + y - 2
    if 0 <= y - 2 < room and number < len(page.lines):
        return page.lines[number].figures.name
    return None


# Pieces


def _up(page: FleetPage) -> list[Run]:
    picture = page.picture
    number = len(picture.lines)
    runs: list[Run] = [
        (f"{picture.num_up}/{number} up", "strong" if picture.num_up == number else "caution")
    ]
    for status in ("stale", "down", "starting", "connecting"):
        count = sum(line.figures.status == status for line in picture.lines)
        style = "badge_down" if status == "down" else "caution"
        if count:
            runs += [("  ", "text"), (f"{count} {status.upper()}", style)]
    if page.recorded:
        runs += [("  ● REC", "mark"), (f" {len(page.recorded)}" * (number > 1), "text")]
    return runs


def _as_many(begin: Line, parts: Sequence[Line], width: int) -> Line:
    """Return the line `begin`, extended by as many whole parts as fit."""
    line = begin
    for part in parts:
        if length_of(line) + length_of(part) > width:
            break
        line = (*line, *part)
    return line


def _totals(page: FleetPage) -> list[Line]:
    """Return for each figure its sum over the engines that publish it; a dash if none does."""
    engines = page.engines
    running = _sum(engines, lambda e: e.num_running)
    seats = _sum(engines, lambda e: e.num_seats)
    room = "" if seats is None else f"/{fmt.short(seats)}"
    values = (
        (" run", "-" if running is None else f"{fmt.short(running)}{room}"),
        ("wait", _or_dash(_sum(engines, lambda e: e.num_waiting))),
        ("out", f"{_or_dash(_sum(engines, lambda e: e.output_tokens_per_s))} tok/s"),
        ("preempt", f"{_or_dash(_sum(engines, lambda e: e.num_preempted))}/m"),
        ("gap", _or_dash(_sum(engines, lambda e: e.num_lost))),
    )
    return [((f"  {label} ", "muted"), (value, "text")) for label, value in values]


def _sum(
    engines: Sequence[EngineFigures], value: Callable[[EngineFigures], float | None]
) -> float | None:
    known = [number for engine in engines if (number := value(engine)) is not None]
    return sum(known) if known else None


def _or_dash(value: float | None) -> str:
    return "-" if value is None else fmt.short(value)


def _table_height(page: FleetPage, height: int, num_notes: int) -> int:
    """Return the height of the table: room for all engines, unless the notes need some of it."""
    wanted = len(page.lines) + 3
    least_notes = min(num_notes + 2, max(3, height // 3))
    return min(height, max(min(wanted, height - least_notes), min(wanted, _LEAST_ROWS + 3)))


def _table(page: FleetPage, width: int, height: int, legend: Line) -> list[Line]:
    places = placed(page, width - 2)
    room = height - 3
    first = first_shown(len(page.lines), room, page.selected)
    body = [heading(places, page)]
    for number in range(first, min(len(page.lines), first + room)):
        is_selected = number == page.selected
        line = row(places, page.lines[number], page, is_selected)
        body.append(fitted(line, width - 2))
    hidden = len(page.lines) - max(0, room)
    title: Line = (("engines", "title"),)
    if hidden > 0:
        title = (*title, (f"  {first + 1}-{first + room} of {len(page.lines)}", "muted"))
    return framed(body, width, height, title, legend)


def _cut(notes: Sequence[Line], room: int) -> list[Line]:
    if len(notes) <= room:
        return list(notes)
    more: Line = ((f" … {len(notes) - room + 1} more lines; a taller window shows them", "muted"),)
    return [*notes[: max(0, room - 1)], more]


# Side by side

_SIDES: tuple[tuple[str, FleetFigure, Callable[[EngineFigures], float | None], str], ...] = (
    ("waiting", "waiting", lambda e: e.num_waiting, "idle"),
    ("KV in use", "kv", lambda e: e.kv_used, "kv_used"),
    ("TTFT p95, ms", "ttft", lambda e: e.ttft_p95_ms, "prefill"),
    ("ITL p95, ms", "itl", lambda e: e.itl_p95_ms, "decode"),
)


def _bars(page: FleetPage, width: int, height: int) -> list[Line]:
    """Return a panel of bars for each figure, on its own scale, an engine each as in the table."""
    number = 4 if width >= 100 else 2
    widths = [width // number] * number
    widths[-1] = width - sum(widths[:-1])
    blocks = []
    for (title, figure, value, style), room in zip(_SIDES[:number], widths, strict=True):
        values = [value(engine) for engine in page.engines]
        top = 1.0 if figure == "kv" else max((v for v in values if v is not None), default=0.0)
        body = [
            _bar(page, line, known, figure, top, style, room - 2)
            for line, known in zip(page.lines, values, strict=True)
        ]
        blocks.append(framed(body, room, height, ((title, "title"),)))
    return beside(*blocks)


def _bar(
    page: FleetPage,
    line: EngineLine,
    value: float | None,
    figure: FleetFigure,
    top: float,
    style: str,
    width: int,
) -> Line:
    name = line.figures.name
    names = [each.name for each in page.engines]
    room = max(4, min(max(len(each) for each in names), (width - 10) // 2))
    text = "-"
    if value is not None:
        text = fmt.percent(value) if figure == "kv" else fmt.short(value)
        if figure in ("ttft", "itl"):
            text = fmt.milliseconds(value)
    stands_out = figure in page.standing_out.get(name, frozenset())
    share = None if value is None else value / top if top else 0.0
    marks: Run = (f"{'▲' if stands_out else ' '}{text:>5} ", "caution" if stands_out else "text")
    runs: list[Run] = [(f" {labels(names, room)[name]:<{room}} ", "muted")]
    cells = max(0, width - room - 2 - len(marks[0]))
    runs += ((" " * cells, "text"),) if share is None else bar(share, cells, style)
    return fitted((*runs, marks), width)


# Over time


def _loads(page: FleetPage, width: int, rows: int) -> list[Line]:
    """Return a sparkline per engine: its number of requests over time, all on one scale."""
    known = [each for line in page.lines for each in line.load if each is not None]
    top = max(known, default=0)
    names = [each.name for each in page.engines]
    room = min(24, max(len(each) for each in names))
    cells = width - 2 - room - 8
    seconds = cells * looks_of_cell(cells) * LOOK_S
    body: list[Line] = []
    for line in page.lines:
        values = spark_values(line.load, page.picture.num_looks, cells)
        styles = ["decode"] * cells
        loads = [None if value is None else float(value) for value in values]
        # An eighth of a cell stays free below the engine above.
        chart = column_chart(loads, rows, top * 8 * rows / (8 * rows - 1), styles)
        now = "-" if line.figures.load is None else fmt.short(line.figures.load)
        for y, chart_line in enumerate(chart):
            is_last = y == rows - 1
            label = f" {labels(names, room)[line.figures.name]:<{room}} {now:>5} "
            runs: Line = ((label if is_last else " " * len(label), "muted"), *chart_line)
            body.append(fitted(runs, width - 2))
    title: Line = (
        ("requests in each", "title"),
        (f"  last {seconds:.0f} s, up to {top:,}", "muted"),
    )
    return framed(body, width, len(body) + 2, title)


def _lives(page: FleetPage, width: int, height: int) -> list[Line]:
    """Return the panel of requests that prefill on one engine and decode on another."""
    picture, inside = page.picture, width - 2
    body = whole_life_lanes.draw(picture.lives, picture.lives_ns, inside, height - 2)
    seconds = whole_life_lanes.seconds(inside)
    title: Line = (("from prefill to decode", "title"), (f"  last {seconds:.0f} s", "muted"))
    return framed(body, width, height, title, whole_life_lanes.LEGEND)


def _events(page: FleetPage, width: int, height: int) -> list[Line]:
    body: list[Line] = []
    for event in reversed(page.picture.events[-(height - 2) :]):
        body.append(
            (
                (f" {fmt.clock(round(event.wall_s * 1e9))} ", "muted"),
                (f"{clean(event.name, 30)} ", "strong"),
                (clean(event.text, width), "text" if event.is_good else "caution"),
            )
        )
    return framed(body, width, min(height, len(body) + 2), (("what happened", "title"),))
