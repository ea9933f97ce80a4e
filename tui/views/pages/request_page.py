"""The request page: one request from arrival to end, its gaps between tokens, and its late tokens.

For each late token it says why the token was late.
"""

import math
from typing import NamedTuple

from stepscope.engine.protocol.wire import RequestView
from stepscope.recordings.attribution.causes import Late, by_cause
from stepscope.recordings.attribution.front import shares_of
from stepscope.recordings.history.lives import Life
from stepscope.recordings.state.latency_samples import Ranked
from stepscope.recordings.state.session import request_name
from stepscope.recordings.state.transcripts import KnownText
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.charts import lanes
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.frame.lane_rows import lane_status
from stepscope.tui.views.framed_panels import (
    Column,
    Target,
    column_chart,
    labelled,
    pairs,
    room_of_last,
    table,
)
from stepscope.tui.views.lines import Line, Run, bounded, clean, facts, framed, joined, titled

MIN_HEIGHT = 4  # of the panel with the text
_PROMPT_SHARE = 3  # the prompt gets a third of its lines if the output needs the rest
_STATUS = {"WAIT": "waiting", "PRE": "prefilling", "DEC": "decoding", "OUT": "preempted"}
_STRIP_KEY: Line = (("!", "breach"), (" late ", "muted"), ("‖", "mark"), (" paused", "muted"))
_COLUMNS = (
    Column("token", 6, True),
    Column("step", 8, True),
    Column("at", 8),
    Column("took ms", 9, True),
    Column("of it", 6, True),
    Column("why, largest first", 0),
)


class _Waits(NamedTuple):
    """A request's waits up to the cursor; `late` has those of them that the page lists."""

    life: Life | None
    all: tuple[Late, ...]
    late: list[Late]


def request_id_of(frame: Frame) -> int | None:
    """Return the request to show: selected, followed, longest waiting, else the oldest."""
    view, requests, summary = frame.view, frame.state.requests, frame.summary
    if view.selected is not None:
        return view.selected
    if view.followed is not None:
        return view.followed
    if summary is not None and summary.max_itl_request_id in requests:
        return summary.max_itl_request_id
    return min(requests, default=None)


def targets(frame: Frame) -> list[Target]:
    found = _view(frame)
    late = [] if found is None else _waits(frame, found).late
    return [Target(each.step, each.request_id) for each in late]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    view = _view(frame)
    if view is None:
        return framed([facts(f" {text}") for text in _absent(frame)], width, height, "request")
    waits, info = _waits(frame, view), frame.state.info
    block_size = None if info is None else info.block_size
    status = _STATUS.get(lane_status(view)) or f"ended: {view.finish_reason or 'reason unknown'}"
    title = f"request {request_name(view.request_id)}"
    misses = late_text.misses_texts(view, block_size, frame.clock)
    body = [
        *_facts(frame, view, waits, width - 2),
        *(facts(f" {fmt.whole_words(text, width - 4)}") for text in misses),
        *lanes.life_line(frame, view, waits.life, width - 2, 4 if height >= 24 else 1),
    ]
    about = f"  {clean(view.client_id, 24)}  {status}"
    lines = framed(body, width, len(body) + 2, titled(title, about))
    texts = None if waits.life is None else waits.life.text
    text_height = height_of_text(texts, height)
    if texts is not None and text_height:
        cursor = math.inf if frame.cursor is None else frame.cursor
        lines += draw_text(texts, cursor, width, text_height)
    if height >= 20:
        # A short list of late tokens leaves more room for the chart of all tokens.
        spare = height - len(lines) - len(waits.late) - 12
        strip_height = min(max(11, min(spare, 20)), (height - len(lines)) // 2)
        if strip_height >= 4:
            lines += _strip(frame, waits, width, strip_height)
    rows = [_row(frame, late, width) for late in waits.late]
    chosen = waits.late[min(frame.view.row, len(rows) - 1)] if rows else None

    def listed(height: int) -> list[Line]:
        body: list[Line] = [((" no token of it was late", "good"),)]
        if rows:
            body = table(_COLUMNS, rows, width - 2, height - 2, frame.view.row)
        heading = titled(f"late tokens ({len(rows)})", "  newest first")
        return framed(body, width, height, heading, f"{frame.key('inspect')} goes to the step")

    return lines + lanes.with_wait(listed, chosen, width, height - len(lines))


def _absent(frame: Frame) -> list[str]:
    request_id = request_id_of(frame)
    if request_id is None:
        unknown = "the engine does not report single requests"
        return ["no request yet" if frame.tells_requests else unknown]
    ended = None if frame.cursor is None else frame.history.end_of(request_id, frame.cursor)
    if ended is None:
        key = frame.key("next_of_request")
        return [f"{request_name(request_id)} does not exist at this step; its next step: {key}"]
    when = f"{frame.clock(ended.time_ns)}, step {ended.step:,}"
    return [ended.text, f"it ended at {when}; its last step: {frame.key('previous_of_request')}"]


def _view(frame: Frame) -> RequestView | None:
    request_id = request_id_of(frame)
    return None if request_id is None else frame.state.requests.get(request_id)


def _waits(frame: Frame, view: RequestView) -> _Waits:
    life = frame.history.lives.life(view, None if frame.view.live else frame.cursor)
    cursor = math.inf if frame.cursor is None else frame.cursor
    every = tuple(late for late in (() if life is None else life.waits) if late.step <= cursor)
    late = [each for each in every if each.gap_ns > _bound_ns(frame, each)]
    return _Waits(life, every, late[::-1])


def _bound_ns(frame: Frame, late: Late) -> float:
    slo = frame.history.slo
    return (slo.itl_ms if late.token_idx else slo.ttft_ms) * 1e6


def _facts(frame: Frame, view: RequestView, waits: _Waits, width: int) -> list[Line]:
    gaps = [each.gap_ns - each.paused_ns for each in waits.all if each.token_idx]
    slo, known = frame.history.slo, not view.is_partial
    firsts = [each for each in waits.all if not each.token_idx]
    first = firsts[0] if firsts and known and view.first_token_ns is not None else None
    ttft_ms = None if first is None else (first.gap_ns - first.paused_ns) / 1e6
    tpot_ms = sum(gaps) / len(gaps) / 1e6 if gaps else None
    p50 = p99 = worst = None
    if gaps:
        ranked = Ranked.of((gap, 1) for gap in gaps)
        p50, p99, worst = (ns / 1e6 for ns in ranked.percentiles((50, 99, 100)))
    arrived = frame.clock(view.arrival_ns)
    entries = [
        ("arrived", arrived if known else "—", "text"),
        ("prompt", fmt.count(view.num_prompt_tokens), "text"),
        ("cached prompt", fmt.count(view.num_cached_tokens) if known else "—", "cached"),
        ("output", f"{view.num_output_tokens:,}/{view.max_tokens if known else '—'}", "text"),
        ("in cache", f"{view.num_computed_tokens:,} tok", "text"),
        ("blocks", fmt.count(view.num_blocks), "text"),
        ("priority", str(view.priority) if known else "—", "text"),
        ("preempted", f"{view.num_preemptions}x", "caution" if view.num_preemptions else "text"),
    ]
    latencies: dict[str, tuple[float | None, float | None]] = {
        "TTFT": (ttft_ms, slo.ttft_ms),
        "ITL p50": (p50, slo.itl_ms),
        "p99": (p99, slo.itl_ms),
        "max": (worst, slo.itl_ms),
        "TPOT": (tpot_ms, None),
    }
    bounds = {"served TTFT": slo.ttft_ms, "longest served ITL": slo.itl_ms}
    latencies |= {name: (ns / 1e6, bounds.get(name)) for name, ns in shares_of(view).items()}
    for name, (ms, bound) in latencies.items():
        entries.append((name, *bounded(fmt.with_ms(ms), ms, bound)))
    if view.front is not None:
        entries.append(("API server", str(view.front.number), "text"))
    return pairs(entries, width)


def _strip(frame: Frame, waits: _Waits, width: int, height: int) -> list[Line]:
    """Return a chart with a bar per token, or the longest wait of several: how long it waited."""
    gaps = [each for each in waits.all if each.token_idx]
    title = "gaps between tokens"
    if not gaps:
        return framed([facts(" none yet: a gap needs two tokens")], width, height, title)
    room = width - 2 - lanes.LIFE_GUTTER - 1
    bound_ms = frame.history.slo.itl_ms
    stride = max(1, -(-len(gaps) // room))
    chunks = [gaps[at : at + stride] for at in range(0, len(gaps), stride)]
    values = [max(each.gap_ns for each in chunk) / 1e6 for chunk in chunks]
    served = [max(each.gap_ns - each.paused_ns for each in chunk) / 1e6 for chunk in chunks]
    top = max(bound_ms * 1.15, *served)
    styles = [
        "breach" if net > bound_ms else "mark" if value > bound_ms else "decode"
        for value, net in zip(values, served, strict=True)
    ]
    chart = column_chart(values, height - 3, top, styles, bound_ms)
    labels = [fmt.milliseconds(top), *[""] * (height - 4)]
    labels[-1 - max(0, min(height - 4, int(bound_ms / top * (height - 3))))] = f"<{bound_ms:g}"
    rows = zip(labels, chart, strict=True)
    body = [(*labelled(label, lanes.LIFE_GUTTER), *line) for label, line in rows]
    glyphs = {"breach": ("!", "breach"), "mark": ("‖", "mark"), "decode": ("─", "frame")}
    marks = joined(glyphs[style] for style in styles)
    body.append((*labelled("token", lanes.LIFE_GUTTER, "┤"), *marks))
    unit = "1 col = 1 token" if stride == 1 else f"1 col = {stride} tokens, worst of them"
    return framed(body, width, height, titled(title, f"  ms ({unit})"), _STRIP_KEY)


def _row(frame: Frame, late: Late, width: int) -> list[Run]:
    is_breach = late.gap_ns - late.paused_ns > _bound_ns(frame, late)
    share = max(by_cause(late.pieces).values(), default=0) / max(1, late.gap_ns)
    sign = {"preempted": "✗ ", "paused": "‖ "}.get(late.cause, "")
    why = late_text.of_wait(late, room_of_last(_COLUMNS, width - 2) - len(sign))
    return [
        ("first" if not late.token_idx else f"#{late.token_idx + 1}", "strong"),
        (f"{late.step:,}", "text"),
        (frame.clock(late.end_ns), "muted"),
        (f"{late.gap_ns / 1e6:,.1f}{'!' if is_breach else ' '}", "breach" if is_breach else "text"),
        (f"{share:.0%}", "muted"),
        (f"{sign}{why}", "text"),
    ]


def height_of_text(known: KnownText | None, height: int) -> int:
    """Return the height of the panel on a page of this height; 0 without text or room for it."""
    return 0 if known is None or height < 18 else min(12, max(MIN_HEIGHT, height // 5))


def draw_text(known: KnownText, last_step: float, width: int, height: int) -> list[Line]:
    """Return the panel: the end of the prompt, and the end of the output as of step `last_step`."""
    room = height - 2
    prompt = "(not in memory: it arrived too early)"
    if known.prompt_text is not None:
        prompt = known.prompt_text
    elif known.prompt_token_ids is not None:
        prompt = " ".join(map(str, known.prompt_token_ids))
    output = known.output_text(last_step)
    if not output and any(said.text is None for said in known.said):
        ids = [each for said in known.said if said.step <= last_step for each in said.token_ids]
        output = " ".join(map(str, ids))
    output_lines = _wrapped(output, width - 4) if output else []
    num_prompt = max(1, room // _PROMPT_SHARE, room - len(output_lines))
    prompt_lines = _tail(_wrapped(prompt, width - 4), num_prompt)
    output_lines = _tail(output_lines, room - len(prompt_lines))
    body: list[Line] = []
    for mark, style, shown in (("◂ ", "muted", prompt_lines), ("▸ ", "text", output_lines)):
        for number, line in enumerate(shown):
            body.append(((mark if not number else "  ", style), (line, style)))
    title = titled("text", "  ◂ prompt  ▸ output, up to the cursor")
    return framed(body, width, height, title)


def _wrapped(text: str, width: int) -> list[str]:
    lines = []
    for paragraph in text.split("\n"):
        safe = clean(paragraph, len(paragraph))
        lines += [safe[at : at + width] for at in range(0, len(safe), width)] or [""]
    return lines


def _tail(lines: list[str], count: int) -> list[str]:
    if len(lines) <= count or count < 1:
        return lines[: max(0, count)]
    return ["…" + lines[-count][1:], *lines[len(lines) - count + 1 :]]
