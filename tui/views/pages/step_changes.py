"""What changed in the step at the cursor: knobs, and differences from the previous step."""

from stepscope.engine.protocol.wire import StepRecord
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.state.audit_text import changes_text, shorter_who
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Field, Line, Run, clean, length_of, whole


def draw(frame: Frame, record: StepRecord, summary: StepSummary, width: int) -> list[Line]:
    """Return a line per knob change in this step, and one on differences from the previous step."""
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
