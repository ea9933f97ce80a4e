"""The KV page: a map of all KV blocks by state, owner or group; who holds them, and how many.

Beside the map: how blocks are shared and filled, and what the cache was worth.
"""

import string
from array import array
from collections import Counter

from stepscope.engine.protocol.wire import CACHED, EMPTY, RequestView
from stepscope.recordings.session.sums import Sums, per, plus
from stepscope.recordings.state.session import request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import kv_map
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.lane_rows import lane_status
from stepscope.tui.views.framed_panels import Column, Target, beside, column_chart, labelled, table
from stepscope.tui.views.lines import Line, Run, clean, facts, framed, joined, titled
from stepscope.tui.views.view import next_kv_map

NARROW = 100  # below this width only the map and one line of figures
FIGURES_WIDTH = 46
_CHART_HEIGHT = 8  # least height
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_OTHERS, _CACHED, _EMPTY = "+", "░", "·"
_UNKNOWN = " the engine does not report its blocks"
_COLUMNS = (
    Column("", 1),
    Column("request", 8),
    Column("blocks", 7, True),
    Column("tokens", 8, True),
    Column("cached", 7, True),
    Column("client", 0),
)
_OWNER_KEY: Line = (
    ("A ", "decode"), ("decodes ", "muted"), ("B ", "prefill"),
    ("prefills, most blocks first  ", "muted"), (_OTHERS, "muted"), (" others  ", "muted"),
    (_CACHED, "kv_cached"), ("cached ", "muted"), (_EMPTY, "kv_empty"), ("free", "muted"),
)  # fmt: skip
_TREND_KEY: Line = (
    ("█", "kv_used"), ("used ", "muted"), ("✗", "preempted"), ("preemption", "muted"),
)  # fmt: skip


def targets(frame: Frame) -> list[Target]:
    return [Target(request_id=view.request_id) for view in kv_map.holders_of(frame)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    info, owner = frame.state.info, frame.state.block_owner
    kind, has_groups = frame.view.kv_map, frame.state.block_groups is not None
    size = "" if info is None or info.num_blocks is None else f"  {kv_map.size_of_pool(info)}"
    about = f"{size}  ({frame.key('sort')}: by {next_kv_map(kind, has_groups=has_groups)})"
    title = titled(f"KV map by {kind}", about)
    by_group = kind == "group" and has_groups  # then letters are those of groups
    key = _group_key(frame) if by_group else kv_map.key(frame, width - 4)
    if kind == "owner" and owner is not None:
        key = _OWNER_KEY
    if width < NARROW:
        body = [*_map(frame, width - 4, height - 4), key, _figure_line(frame)]
        return framed([((" ", "text"), *line) for line in body], width, height, title)
    chart_height = _CHART_HEIGHT if height >= 24 else 0
    map_width = width - FIGURES_WIDTH
    if chart_height and owner is not None:
        # The chart gets the rows that the map does not need.
        chart_height = max(chart_height, height - (-(-len(owner) // (map_width - 4)) + 3))
    map_height = height - chart_height
    cells = _map(frame, map_width - 4, map_height - 3)
    left = framed([((" ", "text"), *line) for line in (*cells, key)], map_width, map_height, title)
    if chart_height:
        left += _trend(frame, map_width, chart_height)
    figures = _figures(frame)
    figures_height = min(len(figures) + 2, height - 6)
    rest = height - figures_height
    holders = enumerate(kv_map.holders_of(frame))
    rows = [_row("" if by_group else _letter(number), view) for number, view in holders]
    listed = table(_COLUMNS, rows, FIGURES_WIDTH - 2, rest - 2, frame.view.row)
    is_known = bool(rows) or frame.state.kv is not None
    if not rows:
        unknown = " the engine does not report who holds blocks"
        listed = [facts(" no block is in use" if is_known else unknown)]
    heading = f"holders ({len(rows)})" if is_known else "holders"
    panels = framed(figures, FIGURES_WIDTH, figures_height, "blocks")
    return beside(left, panels + framed(listed, FIGURES_WIDTH, rest, heading))


def _row(letter: str, view: RequestView) -> list[Run]:
    cached = f"{view.num_cached_tokens:,}" if view.num_cached_tokens else ""
    return [
        (letter, _hue(view)),
        (request_name(view.request_id), "text"),
        (f"{view.num_blocks:,}", "text"),
        (f"{view.num_computed_tokens:,}", "muted"),
        (cached, "cached"),
        (view.client_id, "muted"),
    ]


def _hue(view: RequestView) -> str:
    return "prefill" if lane_status(view) == "PRE" else "decode"


def _letter(number: int) -> str:
    return _LETTERS[number] if number < len(_LETTERS) else _OTHERS


def _map(frame: Frame, width: int, rows: int) -> list[Line]:
    if rows <= 0 or width <= 0:
        return []
    owner, groups, kind = frame.state.block_owner, frame.state.block_groups, frame.view.kv_map
    if owner is None or kind == "state" or (kind == "group" and groups is None):
        return kv_map.state_map(frame, width, rows)
    owner = kv_map.sampled(owner)
    if kind == "group" and groups is not None:
        names = "".join(map(kv_map.group_letter, kv_map.sampled(groups), owner))
        styles = {_EMPTY: "kv_empty"}
        for number in range(len(frame.state.kv_groups or ())):
            styles[kv_map.group_letter(number)] = kv_map.group_style(number)
            styles[kv_map.group_letter(number, CACHED)] = "kv_cached"
        return kv_map.map_of(names, width, rows, styles)
    letters: dict[int, str] = {CACHED: _CACHED, EMPTY: _EMPTY}
    styles = {_CACHED: "kv_cached", _EMPTY: "kv_empty", _OTHERS: "muted"}
    for number, view in enumerate(kv_map.holders_of(frame)):
        letters[view.request_id] = _letter(number)
        styles.setdefault(_letter(number), _hue(view))
    chosen = _letter(frame.view.row)
    styles[chosen] = f"{styles.get(chosen, 'strong')}+cursor"
    names = "".join([letters.get(who, _OTHERS) for who in owner])
    return kv_map.map_of(names, width, rows, styles)


def _group_key(frame: Frame) -> Line:
    runs: list[Run] = []
    for number, (group, _, _) in enumerate(kv_map.groups_of(frame)):
        runs += [(f"{kv_map.group_letter(number)} ", kv_map.group_style(number))]
        runs += facts(f"{clean(group.kind, 20)}  ")
    return (*runs, *facts("small: cached  ", (_EMPTY, "kv_empty"), "free"))


def _figure_line(frame: Frame) -> Line:
    hit = fmt.percent(frame.recent.prefix_hit_rate)
    evictions = f"{fmt.short(frame.recent.evictions_per_s)}/s"
    unfilled = fmt.percent(kv_map.unfilled_share(frame))
    return facts("hit ", hit, "  evictions ", evictions, "  fragmentation ", unfilled)


def _trend(frame: Frame, width: int, height: int) -> list[Line]:
    room = width - 2 - 8
    title = titled("in use", f"  blocks (last {room} steps)")
    cursor = -1 if frame.cursor is None else frame.cursor
    found = frame.history.summaries(max(0, cursor - room + 1), cursor) if cursor >= 0 else []
    steps = [*[None] * (room - len(found)), *found]
    used = [None if step is None else step.kv_used for step in steps]
    if all(number is None for number in used):
        return framed([facts(_UNKNOWN)] * (cursor >= 0), width, height, title)
    sizes = [plus(step.kv_used, step.kv_cached, step.kv_empty) for step in found if step]
    top = max((size for size in sizes if size is not None), default=1)
    chart = column_chart(used, height - 3, top, ["kv_used"] * room)
    labels = [fmt.short(top), *[""] * (len(chart) - 2), "0"]
    body = [(*labelled(label, 8), *line) for label, line in zip(labels, chart, strict=False)]
    marks = (step is not None and step.num_preempted for step in steps)
    axis = joined(("✗", "preempted") if each else ("─", "frame") for each in marks)
    body.append((*labelled("", 8, "┤"), *axis))
    return framed(body, width, height, title, _TREND_KEY)


def _figures(frame: Frame) -> list[Line]:
    state, recent = frame.state, frame.recent
    kv, blocks, info = state.kv, state.blocks, state.info
    lines = [facts(_UNKNOWN)]
    if kv is not None:
        total = max(1, kv.num_blocks)
        lines = [
            _part("used", kv.used, total, "kv_used"),
            _part("cached, free", kv.cached, total, "kv_cached"),
            _part("empty", kv.empty, total, "kv_empty"),
        ]
    lines += _group_lines(frame)
    if blocks is not None and len(blocks.refs):
        lines += _references(blocks.refs)
    evictions = "—" if recent.evictions_per_s is None else f"{recent.evictions_per_s:.1f}/s"
    unfilled = fmt.percent(kv_map.unfilled_share(frame))
    lines += [
        _figure("prefix hit rate", fmt.percent(recent.prefix_hit_rate), "of tokens, 10 s"),
        _figure("evictions", evictions, "of cached blocks"),
        _figure("fragmentation", unfilled, "of held slots"),
    ]
    lines += _transfer_lines(frame)
    if frame.prompts is not None and frame.prompts.num_evicted_tokens is not None:
        return lines + _prompts(frame.prompts)
    if blocks is not None and info is not None and info.engine == "vllm" and info.kv_groups is None:
        lines.append(facts(" why prompts miss: STEPSCOPE_PREFIX_HASHES=1"))
    return lines


def _prompts(sums: Sums) -> list[Line]:
    queried, hit = sums.num_queried_tokens, sums.num_hit_tokens
    if not queried:
        return []
    larger = (plus(hit, more) for more in (sums.num_more_hits_1_5x, sums.num_more_hits_2x))
    half, twice = (fmt.percent(per(hits, queried)) for hits in larger)
    return [
        _figure("prompt tokens", fmt.short(queried), "all in memory"),
        _part("  hit", hit, queried, "cached"),
        _part("  new", sums.num_new_tokens, queried, "muted"),
        _part("  diverged", sums.num_diverged_tokens, queried, "prefill"),
        _part("  evicted", sums.num_evicted_tokens, queried, "caution"),
        _figure("hits, 1.5x pool", half, f"2x pool {twice}"),
    ]


def _part(name: str, count: int | None, total: int, style: str) -> Line:
    share = per(count, total) or 0.0
    number = fmt.count(count) if total < 10_000_000 else fmt.short(count)
    return facts(f" {name:<13}", f"{number:>8} {share:>4.0%}  ", ("█" * round(share * 14), style))


def _figure(name: str, value: str, about: str) -> Line:
    return facts(f" {name:<16}", f"{value:>7}  ", about)


def _group_lines(frame: Frame) -> list[Line]:
    lines: list[Line] = []
    for number, (group, each, share) in enumerate(kv_map.groups_of(frame)):
        # Else the letters are those of the holders.
        letter = kv_map.group_letter(number) if frame.view.kv_map == "group" else " "
        window = "" if group.window is None else f", window {group.window:,}"
        tables = "" if group.num_tables == 1 else f", {group.num_tables} tables"
        about = f"   {group.num_layers} layers{tables}{window}; {group.block_size:,} tok"
        used = (f"{each.used:>7,} {share:>4.0%}", "strong")
        kind, cached = f"{clean(group.kind, 17):<17}", (f" +{each.cached:,} cached", "kv_cached")
        lines.append(facts((f" {letter} ", kv_map.group_style(number)), kind, used, cached))
        lines.append(facts(about[: FIGURES_WIDTH - 2]))
    info = frame.state.info
    if info is not None and info.kv_tokens is not None and info.max_model_len:
        whole = f"tokens, {info.kv_tokens / info.max_model_len:,.1f} × {info.max_model_len:,}"
        lines.append(_figure("room", f"{info.kv_tokens:,}", whole))
    return lines


def _transfer_lines(frame: Frame) -> list[Line]:
    if (found := frame.state.kv_transfers) is None:
        return []
    known = {
        "being loaded": (found.num_loading, found.loading_since_ns),
        "to be sent": (found.num_sending, found.sending_since_ns),
    }
    now_ns = frame.state.time_ns
    return [
        _figure(name, f"{count:,}", f"used blocks, {max(0, now_ns - since_ns) / 1e9:,.1f} s")
        for name, (count, since_ns) in known.items()
        if count and since_ns is not None
    ]


def _references(refs: "array[int]") -> list[Line]:
    counts, stride = Counter(kv_map.sampled(refs)), -(-len(refs) // kv_map.MAX_SAMPLED)
    about = "≈" if stride > 1 else ""
    saved = sum((count - 1) * number for count, number in counts.items() if count > 1) * stride
    shared = sum(number for count, number in counts.items() if count > 1) * stride
    many = sum(number for count, number in counts.items() if count >= 5)
    groups = {"1": counts[1], "2": counts[2], "3-4": counts[3] + counts[4], "5+": many}
    parts = ((f" {name}: ", f"{about}{number * stride:,}") for name, number in groups.items())
    blocks = (f"{about}{shared:>7,}", "kv_shared")
    return [
        ((" references ", "muted"), *(run for part in parts for run in facts(*part))),
        facts(" shared       ", blocks, "  blocks, saves ", f"{about}{saved:,}"),
    ]
