"""Rows of the audit trail: the commands that an engine got, among them changes of knobs.

The row of a knob change shows latencies before and after it, as many as fit.
"""

from typing import TypeAlias

from stepscope.engine.protocol.wire import Audited, KnobsChanged
from stepscope.recordings.history.history import History
from stepscope.recordings.state.audit_text import change_text, changes_text, shorter_who, who_text
from stepscope.recordings.state.series.latency import LatencyReport
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Cell, Column
from stepscope.tui.views.lines import clean

Entry: TypeAlias = KnobsChanged | Audited

EFFECT_S = 10.0  # seconds before and after a change, less if another change is nearer
_WHO_WIDTH = 12
_BEFORE_CHANGE = 1 + 10 + 9 + _WHO_WIDTH + 1  # cells left of the change, with blanks between
_FIGURE_WIDTH = 12
_LEAST, _MOST = 32, 90  # least and most cells of the change
# Which figures to show if there is little room, most important first: the longest wait shows what
# p99 does not. The p50 of ITL says least, because most steps are the same before and after.
_FIGURES = (("itl", "max"), ("itl", "p99"), ("ttft", "p99"), ("ttft", "p50"), ("itl", "p50"))


def _shown(width: int) -> list[tuple[str, str]]:
    """Return the figures that a table of this width has room for, ITL first, the longest last."""
    room = (width - _BEFORE_CHANGE - _LEAST) // (_FIGURE_WIDTH + 1)
    return sorted(_FIGURES[: max(1, room)], key=lambda each: (each[0], each[1] == "max", each[1]))


def _change_width(width: int) -> int:
    figures = len(_shown(width)) * (_FIGURE_WIDTH + 1)
    return max(20, min(_MOST, width - _BEFORE_CHANGE - figures - 1))


def columns(width: int) -> tuple[Column, ...]:
    names = (f"{kind.upper()} {rank}" for kind, rank in _shown(width))
    return (
        Column("step", 9, True),
        Column("at", 8),
        Column("by", _WHO_WIDTH),
        Column("change", _change_width(width)),
        *(Column(name, _FIGURE_WIDTH, True) for name in names),
    )


def change(frame: Frame, entry: KnobsChanged, width: int) -> list[Cell]:
    """Return the row of a knob change, with latencies before and after it (`!`: late)."""
    what = changes_text(entry.old, entry.new, _change_width(width))
    cells, slo = _row(frame, f"{entry.effective_step:,}", entry, what), frame.history.slo
    effect = effect_of(frame.history, entry, frame.state.time_ns)
    if effect is None or all(not report.step.num_samples for report in effect):
        return [*cells, ("unknown", "muted")]
    for kind, rank in _shown(width):
        before, after = (getattr(getattr(report, kind), f"{rank}_ms") for report in effect)
        late = after is not None and after > (slo.itl_ms if kind == "itl" else slo.ttft_ms)
        text = f"{fmt.milliseconds(before)}→{fmt.milliseconds(after)}{'!' if late else ' '}"
        cells.append((text, "breach" if late else "text"))
    return cells


def audited(frame: Frame, entry: Audited) -> list[Cell]:
    step = "refused" if entry.code else f"{entry.effective_step or 0:,}"
    return _row(frame, step, entry, change_text(entry))


def coming(frame: Frame, step: int, entry: Entry, width: int) -> list[Cell]:
    """Return the row of a command after the cursor in a replayed file, without effect yet."""
    what = "ahead: "
    if isinstance(entry, KnobsChanged):
        what += changes_text(entry.old, entry.new, width - _BEFORE_CHANGE - len(what))
    else:
        what += change_text(entry)
    return [(text, "muted") for text, _ in _row(frame, f"{step:,}", entry, what)]


def _row(frame: Frame, step: str, entry: Entry, what: str) -> list[Cell]:
    is_change = isinstance(entry, KnobsChanged)
    style = "caution" if isinstance(entry, Audited) and entry.code else "text"
    who = entry.who if isinstance(entry, KnobsChanged) else who_text(entry)
    return [
        (step, style),
        (fmt.clock(frame.history.wall_ns(entry.time_ns)), "muted"),
        (clean(shorter_who(who, _WHO_WIDTH), _WHO_WIDTH), "text"),
        (what, "mark" if is_change else style),
    ]


def about(entry: Entry, width: int) -> str:
    """Return who did what, in full if that fits."""
    if not isinstance(entry, KnobsChanged):
        text = change_text(entry)
        return fmt.first_fitting((f"{who_text(entry)}: {text}", text), width)
    full = changes_text(entry.old, entry.new)
    short = changes_text(entry.old, entry.new, width)
    return fmt.first_fitting((f"{entry.who}: {full}", full, short), width)


def effect_of(
    history: History, change: KnobsChanged, now_ns: int
) -> tuple[LatencyReport, LatencyReport] | None:
    """Return latencies before and after a change, up to `now_ns`; None if memory lacks it."""
    changes = history.knob_changes
    if change not in changes:
        return None
    at, width_ns = changes.index(change), round(EFFECT_S * 1e9)
    earlier_ns = changes[at - 1].time_ns if at else 0
    later_ns = changes[at + 1].time_ns if at + 1 < len(changes) else now_ns
    begin_ns = max(change.time_ns - width_ns, earlier_ns)
    end_ns = min(change.time_ns + width_ns, later_ns, now_ns)
    before = history.windows.latency(change.time_ns, (change.time_ns - begin_ns) / 1e9, 1)
    after = history.windows.latency(end_ns, (end_ns - change.time_ns) / 1e9, 1)
    return before, after
