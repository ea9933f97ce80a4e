"""The KV page: a map of all KV blocks by state or by owner, and how they are shared and filled."""

import string
from array import array
from collections import Counter
from collections.abc import Sequence

from stepscope.engine.protocol.wire import CACHED, EMPTY, RequestView
from stepscope.recordings.session.sums import Sums, per, plus
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import kv_map
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.lane_rows import lane_status
from stepscope.tui.views.framed_panels import Cell, Column, Target, beside, column_chart, table
from stepscope.tui.views.lines import Line, Run, clean, framed, joined

NARROW = 100  # below this width only the map and one line of figures
_SIDE_WIDTH = 46
_CHART_HEIGHT = 8  # least height
_MAX_BLOCK_WIDTH = 4  # cells
_MAX_COUNTED = 65_536  # most blocks to look at; of more, evenly spaced ones
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
    """Return a target for each request that holds KV blocks."""
    return [Target(request_id=view.request_id) for view in _holders(frame)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    """Return the whole page."""
    info = frame.state.info
    by_owner = frame.view.kv_by_owner
    what, other = ("by owner", "by state") if by_owner else ("by state", "by owner")
    size = ""
    if info is not None and info.num_blocks is not None:
        size = f"  {kv_map.size_of_pool(info)}"
    title: Line = (
        (f"KV map {what}", "title"),
        (f"{size}  ({frame.key('sort')}: {other})", "muted"),
    )
    has_letters = by_owner and frame.state.block_owner is not None
    key = _owner_key() if has_letters else kv_map.key(frame, width - 4)
    if width < NARROW:
        block_width = _block_width(frame, width - 4, height - 4)
        body = [*_map(frame, width - 4, height - 4, block_width), key, _figure_line(frame)]
        return framed([((" ", "text"), *line) for line in body], width, height, title)
    chart_height = _CHART_HEIGHT if height >= 24 else 0
    map_width = width - _SIDE_WIDTH
    block_width = _block_width(frame, map_width - 4, height - chart_height - 3)
    if chart_height and frame.state.block_owner is not None:
        # The chart gets the rows that the map does not need.
        in_a_row = (map_width - 4) // block_width
        needed = -(-len(frame.state.block_owner) // in_a_row) + 3
        chart_height = max(chart_height, height - needed)
    map_height = height - chart_height
    cells = _map(frame, map_width - 4, map_height - 3, block_width)
    body = [((" ", "text"), *line) for line in (*cells, key)]
    left = framed(body, map_width, map_height, title)
    if chart_height:
        left += _trend(frame, map_width, chart_height)
    figures = _figures(frame)
    figures_height = min(len(figures) + 2, height - 6)
    rest = height - figures_height
    holders = _holders(frame)
    rows = [_row(number, view) for number, view in enumerate(holders)]
    listed = table(_COLUMNS, rows, _SIDE_WIDTH - 2, rest - 2, frame.view.row if rows else None) or [
        ((" no block is in use", "muted"),)
    ]
    if not rows and frame.state.kv is None:
        listed = [((" the engine does not report who holds blocks", "muted"),)]
    heading = f"holders ({len(rows)})" if rows or frame.state.kv is not None else "holders"
    right = [
        *framed(figures, _SIDE_WIDTH, figures_height, (("blocks", "title"),)),
        *framed(listed, _SIDE_WIDTH, rest, ((heading, "title"),)),
    ]
    return beside(left, right)


def _holders(frame: Frame) -> list[RequestView]:
    views = (view for view in frame.state.requests.values() if view.num_blocks)
    return sorted(views, key=lambda view: (-view.num_blocks, view.request_id))


def _row(number: int, view: RequestView) -> list[Cell]:
    cached = f"{view.num_cached_tokens:,}" if view.num_cached_tokens else ""
    return [
        (_letter(number), _hue(view)),
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


def _block_width(frame: Frame, width: int, rows: int) -> int:
    """Return how many cells one KV block takes on the map, as many as fit, 1 at least."""
    num_blocks = 0 if frame.state.block_owner is None else len(frame.state.block_owner)
    for cells in range(_MAX_BLOCK_WIDTH, 1, -1):
        if num_blocks and num_blocks <= max(0, width // cells) * max(0, rows):
            return cells
    return 1


def _map(frame: Frame, width: int, rows: int, block_width: int) -> list[Line]:
    if rows <= 0 or width <= 0:
        return []
    if not frame.view.kv_by_owner or frame.state.block_owner is None:
        return kv_map.state_map(frame, width, rows, block_width)
    letters: dict[int, str] = {CACHED: _CACHED, EMPTY: _EMPTY}
    for number, view in enumerate(_holders(frame)):
        letters[view.request_id] = _letter(number)
    owner = frame.state.block_owner
    stride = -(-len(owner) // _MAX_COUNTED)
    names = "".join([letters.get(who, _OTHERS) for who in owner[:: max(1, stride)]])
    if block_width > 1:
        names = "".join([name * block_width for name in names])
        width -= width % block_width
    num_cells = width * rows
    if len(names) > num_cells:
        names = "".join(
            _most(names[len(names) * cell // num_cells : len(names) * (cell + 1) // num_cells])
            for cell in range(num_cells)
        )
    return [_owner_runs(names[y * width : (y + 1) * width], frame) for y in range(rows)]


def _most(names: str) -> str:
    return Counter(names).most_common(1)[0][0]


def _owner_runs(names: str, frame: Frame) -> Line:
    """Return a row of the map by owner: a letter for the request of each block, as in the lanes."""
    styles = {_CACHED: "kv_cached", _EMPTY: "kv_empty", _OTHERS: "muted"}
    styles |= {_letter(number): _hue(view) for number, view in enumerate(_holders(frame)[:52])}
    chosen = _letter(frame.view.row)
    styles[chosen] = f"{styles.get(chosen, 'strong')}+cursor"
    return joined((name, styles.get(name, "muted")) for name in names)


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


# Figures


def _figures(frame: Frame) -> list[Line]:
    kv, owner, refs = frame.state.kv, frame.state.block_owner, frame.state.block_refs
    lines: list[Line] = []
    if kv is None:
        lines.append(((" the engine does not report its blocks", "muted"),))
    else:
        total = max(1, kv.used + kv.cached + kv.empty)
        for name, count, style in (
            ("used", kv.used, "kv_used"),
            ("cached, free", kv.cached, "kv_cached"),
            ("empty", kv.empty, "kv_empty"),
        ):
            cells = round(count / total * 14)
            lines.append(
                (
                    (f" {name:<13}", "muted"),
                    (f"{count:>8,} {count / total:>4.0%}  ", "text"),
                    ("█" * cells, style),
                )
            )
    if owner is not None and refs is not None and len(refs):
        lines += _references(refs)
    rates = frame.rates
    evictions = rates.evictions_per_s
    lines += [
        _figure("prefix hit rate", fmt.percent(rates.prefix_hit_rate), "of tokens, 10 s"),
        _figure(
            "evictions", "—" if evictions is None else f"{evictions:.1f}/s", "of cached blocks"
        ),
        _figure("fragmentation", fmt.percent(kv_map.unfilled_share(frame)), "of held slots"),
    ]
    info, prompts = frame.state.info, frame.prompts
    if prompts is not None and prompts.num_evicted_tokens is not None:
        return lines + _prompts(prompts)
    if owner is not None and info is not None and info.engine == "vllm":
        lines.append(((" why prompts miss: STEPSCOPE_PREFIX_HASHES=1", "muted"),))
    return lines


def _prompts(sums: Sums) -> list[Line]:
    """Return lines on all prompts in memory: how much was hit, and why the rest was not."""
    queried, hit = sums.num_queried_tokens, sums.num_hit_tokens
    if not queried:
        return []
    lines: list[Line] = [_figure("prompt tokens", fmt.short(queried), "all in memory")]
    for name, count, style in (
        ("hit", hit, "cached"),
        ("new", sums.num_new_tokens, "muted"),
        ("diverged", sums.num_diverged_tokens, "prefill"),
        ("evicted", sums.num_evicted_tokens, "caution"),
    ):
        share = per(count, queried) or 0.0
        number = fmt.count(count) if queried < 10_000_000 else fmt.short(count)
        bar = ("█" * round(share * 14), style)
        lines.append(((f"   {name:<11}", "muted"), (f"{number:>8} {share:>4.0%}  ", "text"), bar))
    half, twice = (
        fmt.percent(per(plus(hit, more), queried))
        for more in (sums.num_more_hits_1_5x, sums.num_more_hits_2x)
    )
    lines.append(_figure("hits, 1.5x pool", half, f"2x pool {twice}"))
    return lines


def _figure(name: str, value: str, about: str) -> Line:
    return ((f" {name:<16}", "muted"), (f"{value:>7}  ", "text"), (about, "muted"))


def _references(refs: "array[int]") -> list[Line]:
    """Return lines on how many requests refer to a block, and how many blocks sharing saves."""
    stride = -(-len(refs) // _MAX_COUNTED)
    about = "≈" if stride > 1 else ""
    counts = Counter(refs[::stride] if stride > 1 else refs)
    shared = sum(number for count, number in counts.items() if count > 1) * stride
    saved = sum((count - 1) * number for count, number in counts.items() if count > 1) * stride
    groups = [
        ("1", counts.get(1, 0)),
        ("2", counts.get(2, 0)),
        ("3-4", counts.get(3, 0) + counts.get(4, 0)),
        ("5+", sum(number for count, number in counts.items() if count >= 5)),
    ]
    line: list[Run] = [(" references ", "muted")]
    for name, number in groups:
        line += [(f" {name}: ", "muted"), (f"{about}{number * stride:,}", "text")]
    return [
        tuple(line),
        (
            (" shared       ", "muted"),
            (f"{about}{shared:>7,}", "kv_shared"),
            ("  blocks, saves ", "muted"),
            (f"{about}{saved:,}", "text"),
        ),
    ]


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
    history = frame.history
    summaries = history.summaries(max(0, frame.cursor - room + 1), frame.cursor)
    values: list[float | None] = [None] * (room - len(summaries))
    values += [None if s is None or s.kv_used is None else float(s.kv_used) for s in summaries]
    sizes = [
        s.kv_used + s.kv_cached + s.kv_empty
        for s in summaries
        if s is not None
        and s.kv_used is not None
        and s.kv_cached is not None
        and s.kv_empty is not None
    ]
    if not any(value is not None for value in values):
        text = " the engine does not report its blocks"
        return framed([((text, "muted"),)], width, height, title)
    top = max(sizes, default=1)
    kept: list[float | None] = [None] * (room - len(summaries))
    kept += [
        None if s is None or s.kv_used is None or s.kv_cached is None else s.kv_used + s.kv_cached
        for s in summaries
    ]
    chart = _stacked(values, kept, height - 3, top)
    body: list[Line] = []
    for y, line in enumerate(chart):
        label = fmt.short(top) if y == 0 else "0" if y == len(chart) - 1 else ""
        body.append(((f"{label:>6} ", "muted"), ("│", "frame"), *line))
    marks = "".join("✗" if s is not None and s.num_preempted else "─" for s in summaries)
    marks = "─" * (room - len(marks)) + marks
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
