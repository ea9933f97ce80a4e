"""The step inspector: a panel on what the step at the cursor did, batch row by batch row."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from stepscope.engine.protocol import wire
from stepscope.recordings.attribution.causes import hold_up_text
from stepscope.recordings.attribution.queue import beneficiaries
from stepscope.recordings.state.ranks import late_rank, names, rank_sizes
from stepscope.recordings.state.series.events import request_event
from stepscope.recordings.state.session import SessionState, request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import totals_text
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import (
    Field,
    Line,
    Run,
    clean,
    first_fitting,
    framed,
    length_of,
    whole,
)
from stepscope.tui.views.panels.event_list import ICONS

_MAX_TEXT = 48
_NO_STATE = SessionState()  # the texts of most events need none


def draw(frame: Frame, width: int, height: int, gutter: int) -> list[Line]:
    step = "—" if frame.cursor is None else fmt.count(frame.cursor)
    unit = "record" if frame.is_summed_up else "step"
    title: Line = ((f"{unit} {step}", "title"), (" (follows cursor)", "muted"))
    return framed(body(frame, height - 2, width - 2), width, height, title)


def body(frame: Frame, num_rows: int, width: int) -> list[Line]:
    """Return the lines inside the frame; what does not fit is counted in a last line."""
    record, summary = frame.record, frame.summary
    if record is None or summary is None:
        lost: Line = ((" the record of this step was lost", "muted"),)
        return [] if frame.cursor is None else [lost]
    if record.totals is not None and frame.is_summed_up:
        return totals_text.figures(record)[:num_rows]
    head: list[Line] = [_spent(record), _decodes(record)]
    tail: list[Line] = [
        _cached(record),
        *_idle(record),
        *waiting_lines(record, width),
        _blocks(record),
    ]
    tail += [times_line(record, width), *rank_lines(record, frame.history.info, width)]
    tail += hold_up_lines(record, width)
    is_special = record.held_prefills or record.num_wasted_tokens or record.token_limit is not None
    if is_special or record.hidden_ns is not None:
        tail += prepared_lines(record, overlap=True)
    prefills = [row for row in record.batch or () if row.phase != wire.Phase.DECODE]
    prefills.sort(key=lambda row: -row.num_tokens)
    room = max(1, num_rows - len(head) - len(tail))
    shown = prefills if len(prefills) <= room else prefills[: room - 1]
    rows = [_prefill(row, frame) for row in shown]
    if record.batch is None and record.num_prefill_tokens:
        rows = [_equals("prefill (requests not reported)", record.num_prefill_tokens, "prefill")]
    if len(shown) < len(prefills):
        rest = prefills[len(shown) :]
        tokens = sum(row.num_tokens for row in rest)
        rows.append(_equals(f"prefill of {len(rest)} more", tokens, "prefill"))
    lines = [*head, *rows, *tail]
    return [*lines, *_events(record, num_rows - len(lines))]


def _equals(text: str, value: int | None, style: str = "text") -> Line:
    return ((f" {text:<37}", style), ("= ", "muted"), (f"{fmt.count(value):>6}", "text"))


def _spent(record: wire.StepRecord) -> Line:
    spent = record.num_prefill_tokens + record.num_decode_tokens
    took_ms = (record.tokens_ns - record.schedule_start_ns) / 1e6
    budget = fmt.count(record.token_budget)
    return (
        (f" {fmt.milliseconds(took_ms)} ms", "strong"),
        ("   budget ", "muted"),
        (f"{spent:,}/{budget}", "text"),
        ("   seats ", "muted"),
        (f"{record.num_running}/{fmt.count(record.max_num_seqs)}", "text"),
    )


def _decodes(record: wire.StepRecord) -> Line:
    rows = [row for row in record.batch or () if row.phase == wire.Phase.DECODE]
    text = f"decode {fmt.plural(len(rows), 'request')} × 1 token"
    if record.drafts:
        num_drafts = sum(draft.num_drafted for draft in record.drafts)
        text += f" + {fmt.plural(num_drafts, 'draft')}"
    if record.batch is None:
        text = "decode (requests not reported)"
    return _equals(text, record.num_decode_tokens, "decode")


def _prefill(row: wire.BatchRow, frame: Frame) -> Line:
    what = "recompute" if row.phase == wire.Phase.RECOMPUTE else "prefill"
    view = frame.state.requests.get(row.request_id)
    text = f"{what} {request_name(row.request_id)} {row.start:,}→{row.start + row.num_tokens:,}"
    if view is not None and view.num_prompt_tokens:
        text += f"/{view.num_prompt_tokens:,}"
    if row.flags & wire.RowFlag.FIRST_TOKEN:
        text += " done"
    return _equals(text, row.num_tokens, "prefill")


def _cached(record: wire.StepRecord) -> Line:
    cached = None
    if record.batch is not None:
        cached = sum(row.num_hit_tokens for row in record.batch)
    return _equals("cached (skipped, not spent)", cached, "cached")


def _idle(record: wire.StepRecord) -> list[Line]:
    if record.token_budget is None:
        return []
    padded = record.num_padded_tokens or 0
    spent = record.num_prefill_tokens + record.num_decode_tokens + padded
    padding = [_equals("padding (for no request)", padded, "caution")] if padded else []
    return [*padding, _equals("idle budget", record.token_budget - spent, "muted")]


def waiting_lines(record: wire.StepRecord, width: int) -> list[Line]:
    """Return lines on how many requests wait and why, with as many reasons as fit."""
    if not record.num_waiting:
        return [((" none waiting", "muted"),)]
    reasons = (record.waiting_reasons or {}).items()
    fields = [Field(0, ((f" {record.num_waiting} wait", "text"),))]
    for number, (reason, n) in enumerate(reasons):
        fields.append(Field(1 + number, ((f"{', ' if number else ': '}{n} {reason}", "muted"),)))
    return [whole(fields, width)]


def _blocks(record: wire.StepRecord) -> Line:
    taken = freed = preempted = None
    if record.moves or record.kv is not None:
        taken = sum(move.owner >= 0 for move in record.moves)
        freed = sum(move.owner in (wire.CACHED, wire.EMPTY) for move in record.moves)
    if record.events or record.batch is not None:
        preempted = sum(isinstance(event, wire.Preempted) for event in record.events)
    return (
        (" blocks taken ", "muted"),
        (fmt.count(taken), "text"),
        ("  freed ", "muted"),
        (fmt.count(freed), "text"),
        ("  preempted ", "muted"),
        (fmt.count(preempted), "caution" if preempted else "text"),
    )


PARTS = (("s", "schedule", "cached"), ("l", "launch", "muted"), ("━", "model", "decode"))


def parts_ns(record: wire.StepRecord) -> list[int | None]:
    """Return how long a step was scheduled, launched, and run on the device as the host saw it."""
    at_ns = (record.schedule_start_ns, record.schedule_end_ns, record.launch_ns, record.tokens_ns)
    return [None if a is None or b is None else b - a for a, b in pairwise(at_ns)]


def times_line(record: wire.StepRecord, width: int, *, with_glyphs: bool = False) -> Line:
    """Return a line on how long each part of a step took, in ms; closer together in little room.

    `with_glyphs`: as the legend of the bar that they are drawn in, if all are known.
    """
    known = parts_ns(record)
    with_glyphs = with_glyphs and None not in known
    parts = [*zip(PARTS, known, strict=True), (("", "device", "text"), record.device_ns)]
    line: Line = ()
    for head, gap, most in ((" ms: ", "  ", 8), (" ", "  ", 8), ("", " ", 6), (" ", " ", 3)):
        runs: list[Run] = [(head, "muted")]
        for (glyph, name, style), ns in parts:
            word = name if len(name) <= most or not glyph else name[: min(most, 5)]
            sign, before = glyph if with_glyphs else "", gap if len(runs) > 1 else ""
            runs.append((f"{before}{sign}", style if with_glyphs else "muted"))
            text = fmt.milliseconds(None if ns is None else ns / 1e6)
            is_plain = with_glyphs or style == "muted"
            runs.append((f"{' ' if sign else ''}{word} ", "muted"))
            runs.append((text, "text" if is_plain else style))
        line = tuple(runs)
        if length_of(line) <= width:
            break
    return line


def draft_lines(record: wire.StepRecord) -> list[Line]:
    """Return lines on speculative decoding: accepted draft tokens, and budget lost on others."""
    if not record.drafts:
        return []
    drafted = sum(draft.num_drafted for draft in record.drafts)
    accepted = sum(draft.num_accepted for draft in record.drafts)
    runs: list[Run] = [(" drafts  ", "muted"), (f"{accepted:>7,} of {drafted:,} accepted", "multi")]
    if drafted > accepted:
        runs.append((f", {drafted - accepted:,} tokens of budget wasted", "caution"))
    return [tuple(runs)]


def hold_up_lines(record: wire.StepRecord, width: int) -> list[Line]:
    """Return lines on the three longest things that held up the step, or the time before it."""
    alike: Counter[tuple[str, str]] = Counter()
    for row in record.hold_ups or ():
        alike[row.kind, row.detail] += row.ns
    lines: list[Line] = []
    for (kind, detail), ns in alike.most_common(3):
        took = f"{fmt.milliseconds(ns / 1e6)} ms"
        text = hold_up_text(kind, clean(detail, _MAX_TEXT))
        shown = fmt.whole_words(text, width - len(f" held up {took}: "))
        lines.append(((" held up ", "muted"), (took, "caution"), (f": {shown}", "text")))
    return lines


def prepared_lines(record: wire.StepRecord, overlap: bool | None) -> list[Line]:
    """Return lines on what was prepared while the step before ran, and on what held it."""
    runs: list[Run] = [(" prepared ", "muted")]
    before = f"step {record.step - 1:,}"
    if record.hidden_ns is not None:
        hidden = fmt.milliseconds(record.hidden_ns / 1e6)
        runs += [(f"while {before} ran", "good"), (f", {hidden} ms hidden", "text")]
    elif record.step == 0:
        runs.append(("as the first step", "text"))
    elif overlap is None:
        runs.append(("— (the engine does not report)", "muted"))
    else:
        runs.append((f"after {before} had ended", "text"))
    if record.num_wasted_tokens:
        runs.append((f", {record.num_wasted_tokens:,} wasted", "caution"))
    if record.held_prefills:
        runs.append((", kept free of prefills", "muted"))
    lines: list[Line] = [tuple(runs)]
    if record.cuda_graph is not None:
        padding = record.num_graph_padding
        filled = f", filled up with {fmt.plural(padding, 'token')}" if padding else ""
        lines.append(((" CUDA graph ", "muted"), (record.cuda_graph, "text"), (filled, "muted")))
    if record.hidden_ns is not None and record.device_ns is not None:
        gap_ns = max(0, record.tokens_ns - record.schedule_start_ns - record.device_ns)
        gap = f"{fmt.milliseconds(gap_ns / 1e6)} ms"
        lines.append(((" host's gap ", "muted"), (gap, "text"), (": the device was idle", "muted")))
    if record.token_limit is not None:
        held = fmt.plural(record.token_limit, "token")
        lines.append(((f" held to {held}: device memory", "caution"),))
    return lines


def event_lines(record: wire.StepRecord, before: SessionState | None = None) -> list[Line]:
    """Return a line per event; the state `before` tells who got a preempted one's blocks."""
    takers = {} if before is None else beneficiaries(record, before)
    resumed = {row.request_id for row in record.batch or () if row.flags & wire.RowFlag.RESUMED}
    return [
        _preemption(event, before, takers)
        if before is not None and isinstance(event, wire.Preempted)
        else _event(event, event.request_id in resumed)
        for event in record.events
    ]


def _preemption(
    event: wire.Preempted, before: SessionState, takers: Mapping[int, int | None]
) -> Line:
    taker = takers.get(event.request_id)
    if taker is None:
        return _event(event)
    whom = "itself" if taker == event.request_id else request_name(taker)
    view = before.requests.get(event.request_id)
    lost = fmt.count(None if view is None else view.num_computed_tokens)
    text = f"{request_name(event.request_id)} preempted for {whom}: {lost} tokens lost"
    return ((" ", "text"), ("✗", "preempted"), (f" {clean(text, _MAX_TEXT)}", "text"))


def _events(record: wire.StepRecord, room: int) -> list[Line]:
    lines = event_lines(record)
    if len(lines) > room:
        rest = len(lines) - max(0, room - 1)
        lines = [*lines[: max(0, room - 1)], ((f" and {rest} more events", "muted"),)]
    return lines[: max(0, room)]


def _event(event: wire.RequestEvent, is_resumed: bool = False) -> Line:
    name = request_name(event.request_id)
    icon: Run
    if isinstance(event, wire.Arrived):
        icon, text = ("→", "muted"), f"{name} arrived, {event.num_prompt_tokens:,} prompt tokens"
        if event.origin is not None:
            text += f", handed over by {event.origin.engine}"
    elif isinstance(event, wire.Admitted):
        comes = (
            "resumed, {:,} tokens still cached" if is_resumed else "admitted, {:,} tokens cached"
        )
        icon, text = ("▲", "good"), f"{name} {comes.format(event.num_cached_tokens)}"
        if event.num_loaded_tokens:
            took = f" in {event.load_ns / 1e6:.1f} ms" if event.load_ns else ""
            text += f", {event.num_loaded_tokens:,} loaded{took}"
    elif isinstance(event, wire.FirstToken):
        icon, text = ("━", "decode"), f"{name} first token"
    else:
        said = request_event(event, _NO_STATE, 0, 0)
        assert said is not None
        icon, text = ICONS[said.kind], said.text
    return ((" ", "text"), icon, (f" {clean(text, _MAX_TEXT)}", "text"))


_MOST_NAMED = 4


def rank_lines(record: wire.StepRecord, info: wire.EngineInfo | None, width: int) -> list[Line]:
    """Return a line, and one more on the stages of a pipeline; none for an engine of one rank."""
    if not (ranks := record.ranks):
        is_one = rank_sizes(info) == (1, 1)
        return [] if is_one else [((" ranks   unknown: not all of them told", "muted"),)]
    ms = [each.work_ns / 1e6 for each in ranks]
    each = [f"{name} {fmt.milliseconds(t)} ms" for name, t in zip(names(ranks), ms, strict=True)]
    slowest, middle, spread = map(fmt.milliseconds, (max(ms), median(ms), max(ms) - min(ms)))
    of_many = f"slowest of {len(ms)} {slowest} ms, median {middle}, spread {spread}"
    said, style = [", about even", ""], "muted"
    if (late := late_rank(record)) is not None:
        waited = f"{fmt.milliseconds(late[1] / 1e6)} ms"
        said, style = [f": {late[0]} was waited for, {waited}", f": {late[0]} +{waited}"], "caution"
    head = " ranks   " if info is None or info.device in (None, "cpu") else " launch  "
    times = [of_many] if len(ms) > _MOST_NAMED else [", ".join(each), of_many]
    forms = [((head, "muted"), (text, "text"), (end, style)) for text in times for end in said]
    empty = {f"pp{each.stage}": fmt.percent(_empty(each)) for each in ranks}
    stages = ", ".join(f"{stage} {share}" for stage, share in empty.items())
    lines: list[Line] = [first_fitting(forms, width), ((" empty   ", "muted"), (stages, "text"))]
    return lines if len(empty) > 1 else lines[:1]


def _empty(rank: wire.RankTimes) -> float | None:
    empty_ns = rank.empty_ns
    return None if empty_ns is None else empty_ns / max(1, empty_ns + rank.work_ns)
