"""The step inspector: all batch rows of the step at the cursor, its cost, and its changes."""

from stepscope.engine.protocol.wire import BatchRow, Phase, Preempted, RowFlag, StepRecord
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.state.audit_text import changes_text, shorter_who
from stepscope.recordings.state.session import SessionState, request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text, totals_text
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import (
    Cell,
    Column,
    Target,
    bar,
    beside,
    cells_by_share,
    table,
)
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
from stepscope.tui.views.panels import inspector, waiting_list
from stepscope.tui.views.theme import CAUSE_GLYPHS

NARROW = 100  # below this width one column
_HEAD_HEIGHT = 11
_PHASES = {Phase.PREFILL: "prefill", Phase.DECODE: "decode", Phase.RECOMPUTE: "recompute"}
_COLUMNS = (
    Column("request", 8),
    Column("phase", 9),
    Column("tokens", 7, True),
    Column("positions", 15),
    Column("prompt", 7, True),
    Column("cached", 7, True),
    Column("context", 8, True),
    Column("blocks", 11, True),
    Column("brings", 12),
    Column("client", 0),
)


def targets(frame: Frame) -> list[Target]:
    return [Target(frame.cursor, row.request_id) for row in _rows(frame.record)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    record, summary = frame.record, frame.summary
    step = "—" if frame.cursor is None else fmt.count(frame.cursor)
    title: Line = ((f"step {step}", "title"), *_when(frame), (" (follows cursor)", "muted"))
    if record is None or summary is None:
        return framed(_missing(frame), width, height, title)
    if record.totals is not None and frame.is_summed_up:
        said: list[Line] = [((f" {text}", "muted"),) for text in totals_text.lines(frame)]
        title = ((f"record {step}", "title"), *_when(frame))
        return framed([*totals_text.figures(record), (), *said], width, height, title)
    left = width if width < NARROW else width // 2
    costs = _costs(frame, record, summary, left - 2)
    head_height = min(max(_HEAD_HEIGHT, len(costs) + 2), max(6, height // 2))
    if width < NARROW:
        head = framed(costs, width, head_height, title)
    else:
        events = (
            *_changes(frame, record, summary, width - left - 2),
            *_longest(frame, record.step, width - left - 2),
            *inspector.event_lines(record, _before(frame, record)),
        )
        head = beside(
            framed(costs, left, head_height, title),
            framed(
                events, width - left, head_height, (("since the step before, and in it", "title"),)
            ),
        )
    rows = _rows(record)
    queue_height = waiting_list.height(frame, height - head_height)
    body_height = height - head_height - queue_height
    cells = [_cells(frame, row) for row in rows]
    selected = frame.view.row if rows else None
    body: list[Line] = (
        table(_COLUMNS, cells, width - 2, body_height - 2, selected)
        if record.batch is not None
        else [((" the engine does not report the requests of a step", "muted"),)]
    )
    what = ("rows" if record.batch is None else f"rows ({len(rows)})", "title")
    key = frame.key
    hint = (
        f"{key('lane_up')}/{key('lane_down')} choose  {key('inspect')} request  "
        f"{key('step_back')}/{key('step_forward')} other steps",
        "muted",
    )
    lines = [*head, *framed(body, width, body_height, (what,), (hint,))]
    return lines + waiting_list.draw(frame, record, width, queue_height) if queue_height else lines


def _before(frame: Frame, record: StepRecord) -> SessionState | None:
    """Return the state before a step that preempted a request, if it is known; else None."""
    if not any(isinstance(event, Preempted) for event in record.events):
        return None
    before = frame.history.neighbour(record.step, -1)
    return frame.history.state_at(before) if before == record.step - 1 else None


def _when(frame: Frame) -> Line:
    wall_ns = frame.wall_ns(frame.cursor)
    if wall_ns is None:
        return ()
    return (("  ", "muted"), (fmt.moment(wall_ns, with_tenths=True), "text"))


def _missing(frame: Frame) -> list[Line]:
    if frame.cursor is None:
        return [((" no step yet", "muted"),)]
    return [((" the record of this step was lost", "muted"),)]


def _rows(record: StepRecord | None) -> list[BatchRow]:
    """Return the batch rows: prefills first, the largest on top; then decodes, by request."""
    rows = [] if record is None or record.batch is None else record.batch
    return sorted(
        rows, key=lambda row: (row.phase == Phase.DECODE, -row.num_tokens, row.request_id)
    )


def _cells(frame: Frame, row: BatchRow) -> list[Cell]:
    view = frame.state.requests.get(row.request_id)
    is_decode = row.phase == Phase.DECODE
    end = row.start + row.num_tokens
    brings = "first token" if row.flags & RowFlag.FIRST_TOKEN else ""
    if not brings and is_decode and row.num_tokens > 1:
        brings = f"{row.num_tokens:,} tokens"
    if not brings:
        brings = "token" if is_decode or row.flags & RowFlag.LAST_CHUNK else "no token yet"
    prompt = view.num_prompt_tokens if view is not None and view.num_prompt_tokens else None
    taken = _taken(frame, row)
    return [
        (request_name(row.request_id), "strong"),
        (_PHASES.get(Phase(row.phase), "?"), "decode" if is_decode else "prefill"),
        (f"{row.num_tokens:,}", "text"),
        (f"{row.start:,}→{end:,}", "muted"),
        (fmt.count(prompt), "muted"),
        (f"{row.num_hit_tokens:,}" if row.num_hit_tokens else "", "cached"),
        (f"{end:,}", "text"),
        (f"{row.num_blocks:,}{taken:>5}", "text"),
        (("resumed, " if row.flags & RowFlag.RESUMED else "") + brings, "muted"),
        (clean("" if view is None else view.client_id, 40), "muted"),
    ]


def _taken(frame: Frame, row: BatchRow) -> str:
    """Return how many KV blocks the request of a batch row took in this step; empty if none."""
    record = frame.record
    moves = () if record is None else record.moves
    taken = sum(move.owner == row.request_id for move in moves)
    return f" +{taken}" if taken else ""


# What it cost


def _costs(frame: Frame, record: StepRecord, summary: StepSummary, width: int) -> list[Line]:
    spent = record.num_prefill_tokens + record.num_decode_tokens
    padded = record.num_padded_tokens or 0
    budget = record.token_budget
    seats = record.num_running
    bar_width = max(4, min(24, width - 44))
    info = frame.history.info
    lines: list[Line] = [
        _timing(record, width),
        inspector.times_line(record, width, with_glyphs=True),
        *inspector.rank_lines(record, info, width),
        *inspector.hold_up_lines(record, width),
        (
            (" budget  ", "muted"),
            (f"{spent + padded:>7,} of {fmt.count(budget):<7}", "strong"),
            *bar((spent + padded) / budget if budget else None, bar_width, "prefill"),
        ),
        _spent(record, summary, width),
        *inspector.draft_lines(record),
        (
            (" seats   ", "muted"),
            (f"{seats:>7,} of {fmt.count(record.max_num_seqs):<7}", "strong"),
            *bar(seats / record.max_num_seqs if record.max_num_seqs else None, bar_width, "decode"),
        ),
        _kv(record, bar_width, width),
        *inspector.waiting_lines(record, width),
        *inspector.prepared_lines(record, None if info is None else info.overlap),
    ]
    return lines


def _spent(record: StepRecord, summary: StepSummary, width: int) -> Line:
    padded = record.num_padded_tokens or 0
    spent: Line = (
        ("   decode ", "muted"),
        (f"{record.num_decode_tokens:,}", "decode"),
        ("  prefill ", "muted"),
        (f"{record.num_prefill_tokens:,}", "prefill"),
    )
    cached: Run = (fmt.count(summary.num_cached_tokens), "cached")
    padding: Line = (("  padding ", "muted"), (f"{padded:,}", "caution")) if padded else ()
    return first_fitting(
        (
            (*spent, ("  cached, not spent ", "muted"), cached, *padding),
            (*spent, ("  cached ", "muted"), cached, *padding),
            (*spent, *padding),
            spent,
        ),
        width,
    )


def _longest(frame: Frame, step: int, width: int) -> list[Line]:
    late = frame.history.stall(step)
    if late is None:
        return []
    is_breach = not late.is_excused
    mark = "!" if is_breach else ""
    lines: list[Line] = [
        (
            (" longest wait for a token ", "muted"),
            (request_name(late.request_id), "strong"),
            (f" {late.gap_ns / 1e6:,.1f} ms{mark}", "breach" if is_breach else "text"),
        )
    ]
    pieces = [piece for piece in late.pieces if piece.ns * 100 >= late.gap_ns]
    for piece in sorted(pieces, key=lambda piece: -piece.ns)[:3]:
        glyph, style = CAUSE_GLYPHS[piece.cause]
        room = max(8, width - 17)
        text = clean(late_text.of_piece(piece, room), room)
        lines.append(
            ((f" {piece.ns / 1e6:>9,.1f} ms ", "text"), (glyph, style), (f" {text}", "muted"))
        )
    return lines


def _timing(record: StepRecord, width: int) -> Line:
    took_ms = max(1, record.tokens_ns - record.schedule_start_ns) / 1e6
    room, known = max(8, width - 16), [ns for ns in inspector.parts_ns(record) if ns is not None]
    took: Run = (f" {fmt.milliseconds(took_ms):>6} ms ", "strong")
    if len(known) < len(inspector.PARTS):
        return (took, ("━" * room, "decode"))
    parts = zip(inspector.PARTS, cells_by_share(known, room), strict=True)
    return (took, *((glyph * cells, style) for (glyph, _, style), cells in parts))


def _kv(record: StepRecord, bar_width: int, width: int) -> Line:
    kv = record.kv
    if kv is None:
        return ((" KV      ", "muted"), ("the engine does not report its blocks", "muted"))
    total = kv.used + kv.cached + kv.empty
    figures: Line = ((" KV      ", "muted"), (f"{kv.used:>7,} of {total:<7,}", "strong"))
    cached: Line = ((f"  {kv.cached:,} cached", "muted"),)
    evicted: Line = ((f"  {kv.evicted:,} evicted", "caution"),) if kv.evicted else ()
    rest = whole((Field(1, cached), Field(0, evicted)), width - length_of(figures) - 2)
    room = max(2, width - length_of(figures) - length_of(rest))
    used = bar(kv.used / total if total else None, min(bar_width, room), "kv_used")
    return (*figures, *used, *rest)


def _changes(frame: Frame, record: StepRecord, summary: StepSummary, width: int) -> list[Line]:
    history = frame.history
    before_step = history.neighbour(record.step, -1)
    before = history.summary(before_step) if before_step < record.step else None
    lines: list[Line] = []
    if summary.after_gap:
        lines.append(((" ? ", "caution"), ("records before this step are missing", "text")))
    for change in history.knob_changes:
        if change.effective_step == record.step:
            what = changes_text(change.old, change.new, width - 3)
            who: Line = ((f" by {clean(shorter_who(change.who, 16), 16)}", "text"),)
            changed: Line = ((" ◆ ", "mark"), (clean(what, width - 3), "text"))
            lines.append(whole((Field(0, changed), Field(1, who)), width))
    if before is None:
        return [*lines, ((" the step before is unknown", "muted"),)]
    idle_ms = max(0, record.schedule_start_ns - before.tokens_ns) / 1e6
    lines.append(
        (
            (" after step ", "muted"),
            (f"{before.step:,}", "text"),
            (f", {fmt.milliseconds(idle_ms)} ms later; against it:", "muted"),
        )
    )
    deltas = (
        ("took", summary.duration_ns / 1e6, before.duration_ns / 1e6),
        ("prefill", summary.num_prefill_tokens, before.num_prefill_tokens),
        ("decode", summary.num_decode_tokens, before.num_decode_tokens),
        ("run", summary.num_running, before.num_running),
        ("wait", summary.num_waiting, before.num_waiting),
        ("KV", summary.kv_used, before.kv_used),
    )
    fields: list[Field] = []
    moving: list[Field] = []
    for rank, (name, now, then) in enumerate(deltas):
        delta: list[Run] = [(f"{', ' if fields else ' '}{name} ", "muted")]
        if now is None or then is None:
            delta.append(("—", "text"))
        else:
            style = "text" if now == then else "strong"
            moved = _longer(now - then) if name == "took" else f"{now - then:+,}"
            delta.append((moved, style))
        fields.append(Field(rank, tuple(delta)))
        if name == "took" or now != then:
            moving.append(fields[-1])
    # If not all figures fit, those that have not changed are left out.
    has_room = sum(length_of(field.line) for field in fields) <= width
    return [*lines, whole(fields if has_room else moving, width)]


def _longer(ms: float) -> str:
    """Return the difference of two durations in words: "as long", "1.2 ms more"."""
    if abs(ms) < 0.05:
        return "as long"
    return f"{abs(ms):,.1f} ms {'less' if ms < 0 else 'more'}"
