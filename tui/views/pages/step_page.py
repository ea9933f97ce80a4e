"""The step's page: all batch rows of the step at the cursor, its cost, and its changes."""

from stepscope.engine.protocol.wire import (
    BatchRow,
    Phase,
    Preempted,
    RequestView,
    RowFlag,
    StepRecord,
)
from stepscope.recordings.attribution.open_waits import blocking_reason
from stepscope.recordings.attribution.queue import in_order, reason_text
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.state.audit_text import changes_text, shorter_who
from stepscope.recordings.state.session import SessionState, request_name
from stepscope.tui.views import format as fmt
from stepscope.tui.views import late_text
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Column, Rows, Target, beside, table
from stepscope.tui.views.lines import Field, Line, Run, clean, facts, framed, whole
from stepscope.tui.views.panels import inspector
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
    step, wall_ns = fmt.count(frame.cursor), frame.wall_ns(frame.cursor)
    when = "" if wall_ns is None else f"  {fmt.moment(wall_ns, with_tenths=True)}"
    title: Line = ((f"step {step}", "title"), (when, "text"), (" (follows cursor)", "muted"))
    if record is None or summary is None:
        return framed([inspector.missing(frame)], width, height, title)
    if record.totals is not None and frame.is_summed_up:
        said = [facts(f" {text}") for text in inspector.lacks(frame)]
        title = ((f"record {step}", "title"), (when, "text"))
        return framed([*inspector.totals(record), (), *said], width, height, title)
    left = width if width < NARROW else width // 2
    costs = inspector.costs(frame, record, summary, left - 2)
    head_height = min(max(_HEAD_HEIGHT, len(costs) + 2), max(6, height // 2))
    head = framed(costs, left, head_height, title)
    if left < width:
        inner = width - left - 2
        events = _changes(frame, record, summary, inner) + _longest(frame, record.step, inner)
        events += inspector.event_lines(record, _before(frame, record))
        heading = "since the step before, and in it"
        head = beside(head, framed(events, width - left, head_height, heading))
    rows, num_waiting = _rows(record), len(_waiting(frame))
    room = height - head_height
    queue_height = min(num_waiting + 3, room // 3) if num_waiting and room >= 12 else 0
    body_height = height - head_height - queue_height
    what, key = "rows", frame.key
    body = [facts(" the engine does not report the requests of a step")]
    if record.batch is not None:
        what, cells = f"rows ({len(rows)})", [_cells(frame, row) for row in rows]
        body = table(_COLUMNS, cells, width - 2, body_height - 2, frame.view.row)
    hint = (
        f"{key('lane_up')}/{key('lane_down')} choose  {key('inspect')} request  "
        f"{key('step_back')}/{key('step_forward')} other steps"
    )
    lines = [*head, *framed(body, width, body_height, what, hint)]
    return lines + _queue(frame, record, width, queue_height) if queue_height else lines


def _before(frame: Frame, record: StepRecord) -> SessionState | None:
    """Return the state before a step that preempted a request, if it is known; else None."""
    if not any(isinstance(event, Preempted) for event in record.events):
        return None
    before = frame.history.neighbour(record.step, -1)
    return frame.history.state_at(before) if before == record.step - 1 else None


def _rows(record: StepRecord | None) -> list[BatchRow]:
    """Return the batch rows: prefills first, the largest on top; then decodes, by request."""

    def rank(row: BatchRow) -> tuple[bool, int, int]:
        return row.phase == Phase.DECODE, -row.num_tokens, row.request_id

    return [] if record is None else sorted(record.batch or (), key=rank)


def _cells(frame: Frame, row: BatchRow) -> list[Run]:
    view, record = frame.state.requests.get(row.request_id), frame.record
    is_decode, end = row.phase == Phase.DECODE, row.start + row.num_tokens
    brings = "token" if is_decode or row.flags & RowFlag.LAST_CHUNK else "no token yet"
    if row.flags & RowFlag.FIRST_TOKEN:
        brings = "first token"
    elif is_decode and row.num_tokens > 1:
        brings = f"{row.num_tokens:,} tokens"
    prompt = view.num_prompt_tokens if view is not None and view.num_prompt_tokens else None
    taken = sum(move.owner == row.request_id for move in (record.moves if record else ()))
    more = f" +{taken}" if taken else ""
    return [
        (request_name(row.request_id), "strong"),
        (_PHASES.get(Phase(row.phase), "?"), "decode" if is_decode else "prefill"),
        (f"{row.num_tokens:,}", "text"),
        (f"{row.start:,}→{end:,}", "muted"),
        (fmt.count(prompt), "muted"),
        (f"{row.num_hit_tokens:,}" if row.num_hit_tokens else "", "cached"),
        (f"{end:,}", "text"),
        (f"{row.num_blocks:,}{more:>5}", "text"),
        (("resumed, " if row.flags & RowFlag.RESUMED else "") + brings, "muted"),
        ("" if view is None else view.client_id, "muted"),
    ]


def _longest(frame: Frame, step: int, width: int) -> list[Line]:
    late = frame.history.stall(step)
    if late is None:
        return []
    mark, style = ("", "text") if late.is_excused else ("!", "breach")
    took = (f" {late.gap_ns / 1e6:,.1f} ms{mark}", style)
    name = (request_name(late.request_id), "strong")
    lines = [facts(" longest wait for a token ", name, took)]
    pieces = [piece for piece in late.pieces if piece.ns * 100 >= late.gap_ns]
    for piece in sorted(pieces, key=lambda piece: -piece.ns)[:3]:
        room = max(8, width - 17)
        why = f" {clean(late_text.of_piece(piece, room), room)}"
        took = (f" {piece.ns / 1e6:>9,.1f} ms ", "text")
        lines.append((took, CAUSE_GLYPHS[piece.cause], (why, "muted")))
    return lines


def _changes(frame: Frame, record: StepRecord, summary: StepSummary, width: int) -> list[Line]:
    history = frame.history
    before_step = history.neighbour(record.step, -1)
    before = history.summary(before_step) if before_step < record.step else None
    lines: list[Line] = []
    if summary.after_gap:
        lines.append(((" ? ", "caution"), ("records before this step are missing", "text")))
    for change in history.knob_changes:
        if change.effective_step == record.step:
            what = clean(changes_text(change.old, change.new, width - 3), width - 3)
            who = f" by {clean(shorter_who(change.who, 16), 16)}"
            changed: Line = ((" ◆ ", "mark"), (what, "text"))
            lines.append(whole((Field(0, changed), Field(1, ((who, "text"),))), width))
    if before is None:
        return [*lines, facts(" the step before is unknown")]
    idle_ms = max(0, record.schedule_start_ns - before.tokens_ns) / 1e6
    later = f", {fmt.milliseconds(idle_ms)} ms later; against it:"
    lines.append(facts(" after step ", f"{before.step:,}", later))
    deltas = (
        ("took", summary.duration_ns / 1e6, before.duration_ns / 1e6),
        ("prefill", summary.num_prefill_tokens, before.num_prefill_tokens),
        ("decode", summary.num_decode_tokens, before.num_decode_tokens),
        ("run", summary.num_running, before.num_running),
        ("wait", summary.num_waiting, before.num_waiting),
        ("KV", summary.kv_used, before.kv_used),
    )
    fields: list[Field] = []
    for rank, (name, now, then) in enumerate(deltas):
        moved = "—"
        if now is not None and then is not None:
            moved = f"{now - then:+,}"
            if name == "took":
                more = "less" if now < then else "more"
                is_same = abs(now - then) < 0.05
                moved = "as long" if is_same else f"{abs(now - then):,.1f} ms {more}"
        style = "text" if now == then else "strong"
        # If not all figures fit, those that have not changed are left out first.
        rank += 10 * (now == then)
        fields.append(Field(rank, facts(f"{', ' if fields else ' '}{name} ", (moved, style))))
    return [*lines, whole(fields, width)]


_NUM_PREEMPTIONS = 200  # the newest preemptions to look up
_QUEUE_COLUMNS = (
    Column("request", 8),
    Column("since", 8),
    Column("waits", 8, True),
    Column("prompt", 7, True),
    Column("behind", 7, True),
    Column("for", 0),
)


def _queue(frame: Frame, record: StepRecord, width: int, num_lines: int) -> list[Line]:
    events = frame.history.events(frame.cursor, _NUM_PREEMPTIONS, frozenset({"preempt"}))
    # When each was last preempted, as far as memory reaches back.
    preempted_ns = {each.request_id: each.time_ns for each in events if each.request_id is not None}
    queue = in_order(_waiting(frame), preempted_ns, frame.state.knobs)

    def row(place: int) -> list[Run]:
        view = queue[place]
        is_out = view.status == "preempted"
        since_ns = None if view.is_partial else view.arrival_ns
        since_ns = preempted_ns.get(view.request_id) if is_out else since_ns
        since = waits = "—"
        if since_ns is not None:
            wall_ns = frame.history.wall_ns(since_ns)
            since = "—" if wall_ns is None else fmt.clock(wall_ns)
            waits = f"{max(0, frame.state.time_ns - since_ns) / 1e9:,.1f} s"
        return [
            (request_name(view.request_id), "caution" if is_out else "strong"),
            (since, "muted"),
            (waits, "text"),
            (f"{view.num_prompt_tokens:,}", "muted"),
            (f"{len(queue) - 1 - place:,}", "text"),
            (_reason(frame, record, queue, place), "text" if not place else "muted"),
        ]

    # Remove the marks for clicks: only the batch rows of the step can be selected.
    lines = table(_QUEUE_COLUMNS, Rows(len(queue), row), width - 2, num_lines - 2, None)
    body = [tuple(run for run in line if run[0]) for line in lines]
    return framed(body, width, num_lines, f"waiting ({len(queue)}), in the order of the queue")


def _waiting(frame: Frame) -> list[RequestView]:
    views = frame.state.requests.values()
    return [view for view in views if view.status in ("waiting", "preempted")]


def _reason(frame: Frame, record: StepRecord, queue: list[RequestView], place: int) -> str:
    view, is_paused = queue[place], frame.state.state == "paused"
    if not (is_paused or view.held) and "kv_blocks" in (record.waiting_reasons or {}):
        first = next((each for each in queue if each.held in ("", "priority")), view)
        if first is not view:
            return f"behind {request_name(first.request_id)}"
    text = reason_text("paused" if is_paused else view.held or blocking_reason(record))
    if view.num_blocks:
        text += f"; holds {fmt.plural(view.num_blocks, 'block')}"
    return f"{text}; was preempted" if view.status == "preempted" else text
