"""The KV page: a map of all KV blocks by state, owner or group; who holds them, and how many."""

import string
from collections import Counter
from collections.abc import Sequence

from stepscope.engine.protocol.wire import CACHED, EMPTY, RequestView
from stepscope.recordings.session.sums import plus
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import kv_map
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.lane_rows import lane_status
from stepscope.tui.views.framed_panels import Cell, Column, Target, beside, column_chart, table
from stepscope.tui.views.lines import Line, Run, clean, framed, joined
from stepscope.tui.views.panels import kv_figures
from stepscope.tui.views.view import next_kv_map

NARROW = 100  # below this width only the map and one line of figures
_CHART_HEIGHT = 8  # least height
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_OTHERS, _CACHED, _EMPTY = "+", "░", "·"
_COLUMNS = (
    Column("", 1),
    Column("request", 8),
    Column("blocks", 7, True),
    Column("tokens", 8, True),
    Column("cached", 7, True),
    Column("client", 0),
)


def targets(frame: Frame) -> list[Target]:
    return [Target(request_id=view.request_id) for view in _holders(frame)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    info = frame.state.info
    kind, has_groups = frame.view.kv_map, frame.state.block_groups is not None
    size = ""
    if info is not None and info.num_blocks is not None:
        size = f"  {kv_map.size_of_pool(info)}"
    title: Line = (
        (f"KV map by {kind}", "title"),
        (f"{size}  ({frame.key('sort')}: by {next_kv_map(kind, has_groups=has_groups)})", "muted"),
    )
    by_group = kind == "group" and has_groups  # then letters are those of groups
    if by_group:
        key = _group_key(frame)
    elif kind == "owner" and frame.state.block_owner is not None:
        key = _owner_key()
    else:
        key = kv_map.key(frame, width - 4)
    if width < NARROW:
        body = [*_map(frame, width - 4, height - 4), key, _figure_line(frame)]
        return framed([((" ", "text"), *line) for line in body], width, height, title)
    chart_height = _CHART_HEIGHT if height >= 24 else 0
    map_width = width - kv_figures.WIDTH
    if chart_height and frame.state.block_owner is not None:
        # The chart gets the rows that the map does not need.
        needed = -(-len(frame.state.block_owner) // (map_width - 4)) + 3
        chart_height = max(chart_height, height - needed)
    map_height = height - chart_height
    cells = _map(frame, map_width - 4, map_height - 3)
    body = [((" ", "text"), *line) for line in (*cells, key)]
    left = framed(body, map_width, map_height, title)
    if chart_height:
        left += _trend(frame, map_width, chart_height)
    figures = kv_figures.draw(frame)
    figures_height = min(len(figures) + 2, height - 6)
    rest = height - figures_height
    holders = _holders(frame)
    rows = [_row("" if by_group else _letter(n), view) for n, view in enumerate(holders)]
    listed = table(
        _COLUMNS, rows, kv_figures.WIDTH - 2, rest - 2, frame.view.row if rows else None
    ) or [((" no block is in use", "muted"),)]
    if not rows and frame.state.kv is None:
        listed = [((" the engine does not report who holds blocks", "muted"),)]
    heading = f"holders ({len(rows)})" if rows or frame.state.kv is not None else "holders"
    right = [
        *framed(figures, kv_figures.WIDTH, figures_height, (("blocks", "title"),)),
        *framed(listed, kv_figures.WIDTH, rest, ((heading, "title"),)),
    ]
    return beside(left, right)


def _holders(frame: Frame) -> list[RequestView]:
    views = (view for view in frame.state.requests.values() if view.num_blocks)
    return sorted(views, key=lambda view: (-view.num_blocks, view.request_id))


def _row(letter: str, view: RequestView) -> list[Cell]:
    cached = f"{view.num_cached_tokens:,}" if view.num_cached_tokens else ""
    return [
        (letter, _hue(view)),
        (request_name(view.request_id), "text"),
        (f"{view.num_blocks:,}", "text"),
        (f"{view.num_computed_tokens:,}", "muted"),
        (cached, "cached"),
        (clean(view.client_id, 20), "muted"),
    ]


def _hue(view: RequestView) -> str:
    return "prefill" if lane_status(view) == "PRE" else "decode"


def _letter(number: int) -> str:
    return _LETTERS[number] if number < len(_LETTERS) else _OTHERS


# The map


def _map(frame: Frame, width: int, rows: int) -> list[Line]:
    if rows <= 0 or width <= 0:
        return []
    owner, groups = frame.state.block_owner, frame.state.block_groups
    kind = frame.view.kv_map
    if owner is None or kind == "state" or (kind == "group" and groups is None):
        return kv_map.state_map(frame, width, rows)
    owner = owner[:: max(1, -(-len(owner) // kv_figures.MAX_COUNTED))]
    if kind == "group" and groups is not None:
        sampled = groups[:: max(1, -(-len(groups) // kv_figures.MAX_COUNTED))]
        names = "".join(map(kv_map.group_letter, sampled, owner))
        styles = _group_styles(frame)
    else:
        letters: dict[int, str] = {CACHED: _CACHED, EMPTY: _EMPTY}
        for number, view in enumerate(_holders(frame)):
            letters[view.request_id] = _letter(number)
        names = "".join([letters.get(who, _OTHERS) for who in owner])
        styles = _owner_styles(frame)
    num_cells = width * rows
    if len(names) > num_cells:
        names = "".join(
            _most(names[len(names) * cell // num_cells : len(names) * (cell + 1) // num_cells])
            for cell in range(num_cells)
        )
    lines = [names[y * width : (y + 1) * width] for y in range(rows)]
    return [joined((name, styles.get(name, "muted")) for name in line) for line in lines]


def _most(names: str) -> str:
    return Counter(names).most_common(1)[0][0]


def _owner_styles(frame: Frame) -> dict[str, str]:
    """Return the styles of the map by owner: a letter for the request of each block."""
    styles = {_CACHED: "kv_cached", _EMPTY: "kv_empty", _OTHERS: "muted"}
    styles |= {_letter(number): _hue(view) for number, view in enumerate(_holders(frame)[:52])}
    chosen = _letter(frame.view.row)
    styles[chosen] = f"{styles.get(chosen, 'strong')}+cursor"
    return styles


def _group_styles(frame: Frame) -> dict[str, str]:
    styles = {_EMPTY: "kv_empty"}
    for number in range(len(frame.state.kv_groups or ())):
        styles[kv_map.group_letter(number)] = kv_map.group_style(number)
        styles[kv_map.group_letter(number, CACHED)] = "kv_cached"
    return styles


def _group_key(frame: Frame) -> Line:
    runs: list[Run] = []
    for number, (group, _, _) in enumerate(kv_map.groups_of(frame)):
        runs += [(f"{kv_map.group_letter(number)} ", kv_map.group_style(number))]
        runs += [(f"{clean(group.kind, 20)}  ", "muted")]
    return (*runs, ("small: cached  ", "muted"), (_EMPTY, "kv_empty"), ("free", "muted"))


def _owner_key() -> Line:
    return (
        ("A ", "decode"),
        ("decodes ", "muted"),
        ("B ", "prefill"),
        ("prefills, most blocks first  ", "muted"),
        (_OTHERS, "muted"),
        (" others  ", "muted"),
        (_CACHED, "kv_cached"),
        ("cached ", "muted"),
        (_EMPTY, "kv_empty"),
        ("free", "muted"),
    )


def _figure_line(frame: Frame) -> Line:
    return (
        ("hit ", "muted"),
        (fmt.percent(frame.rates.prefix_hit_rate), "text"),
        ("  evictions ", "muted"),
        (f"{fmt.short(frame.rates.evictions_per_s)}/s", "text"),
        ("  fragmentation ", "muted"),
        (fmt.percent(kv_map.unfilled_share(frame)), "text"),
    )


def _trend(frame: Frame, width: int, height: int) -> list[Line]:
    """Return a panel of the KV blocks over the steps up to the cursor, one column per step."""
    room = width - 2 - 8
    title: Line = (("in use", "title"), (f"  blocks (last {room} steps)", "muted"))
    if frame.cursor is None:
        return framed([], width, height, title)
    found = frame.history.summaries(max(0, frame.cursor - room + 1), frame.cursor)
    steps = [*[None] * (room - len(found)), *found]
    used = [None if step is None else step.kv_used for step in steps]
    kept = [None if step is None else plus(step.kv_used, step.kv_cached) for step in steps]
    sizes = [plus(step.kv_used, step.kv_cached, step.kv_empty) for step in found if step]
    if not any(number is not None for number in used):
        text = " the engine does not report its blocks"
        return framed([((text, "muted"),)], width, height, title)
    top = max((size for size in sizes if size is not None), default=1)
    chart = _stacked(used, kept, height - 3, top)
    body: list[Line] = []
    for y, line in enumerate(chart):
        label = fmt.short(top) if y == 0 else "0" if y == len(chart) - 1 else ""
        body.append(((f"{label:>6} ", "muted"), ("│", "frame"), *line))
    marks = "".join("✗" if step is not None and step.num_preempted else "─" for step in steps)
    axis = [(glyph, "preempted" if glyph == "✗" else "frame") for glyph in f"┤{marks}"]
    body.append((("       ", "muted"), *joined(axis)))
    legend: Line = (
        ("█", "kv_used"),
        ("used ", "muted"),
        ("░", "kv_cached"),
        ("cached ", "muted"),
        ("✗", "preempted"),
        ("preemption", "muted"),
    )
    return framed(body, width, height, title, legend)


def _stacked(
    used: Sequence[float | None], kept: Sequence[float | None], height: int, top: int
) -> list[Line]:
    """Return bars of used blocks with the cached blocks stacked on top, rounded to whole cells."""
    below = column_chart(used, height, top, ["kv_used"] * len(used))
    lines: list[Line] = []
    for y, line in enumerate(below):
        cells: list[Run] = []
        for cell, value in zip("".join(text for text, _ in line), kept, strict=True):
            is_kept = value is not None and value / top * height >= height - y - 0.5
            cells.append(("░", "kv_cached") if cell == " " and is_kept else (cell, "kv_used"))
        lines.append(joined(cells))
    return lines
