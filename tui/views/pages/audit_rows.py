"""Rows of the audit trail: the commands that an engine got, among them changes of knobs.

The row of a knob change shows latencies before and after it, as many as fit.
"""

from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import Audited, KnobsChanged
from stepscope.recordings.history.history import History
from stepscope.recordings.state.audit_text import change_text, changes_text, shorter_who, who_text
from stepscope.recordings.state.series.latency import LatencyKind, LatencyReport
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Cell, Column
from stepscope.tui.views.lines import clean

Entry: TypeAlias = KnobsChanged | Audited

_WHO_WIDTH = 12
_BEFORE_CHANGE = 1 + 10 + 9 + _WHO_WIDTH + 1  # cells left of the change, with blanks between
_FIGURE_WIDTH = 12
_LEAST, _MOST = 32, 90  # least and most cells of the change
# Which figures to show if there is little room, most important first: the longest wait shows what
# p99 does not. The p50 of ITL says least, because most steps are the same before and after.
_RANKS = (("itl", "max"), ("itl", "p99"), ("ttft", "p99"), ("ttft", "p50"), ("itl", "p50"))


def columns(width: int) -> tuple[Column, ...]:
    names = [f"{kind.upper()} {rank}" for kind, rank in FIGURES]
    return (
        Column("step", 9, True),
        Column("at", 8),
        Column("by", _WHO_WIDTH),
        Column("change", _change_width(width)),
        *(Column(names[at], _FIGURE_WIDTH, True) for at in _shown(width)),
    )


def _shown(width: int) -> list[int]:
    """Return the indices of the latencies in `FIGURES` that a table of this width has room for."""
    room = (width - _BEFORE_CHANGE - _LEAST) // (_FIGURE_WIDTH + 1)
    return sorted(FIGURES.index(each) for each in _RANKS[: max(1, room)])


def _change_width(width: int) -> int:
    figures = len(_shown(width)) * (_FIGURE_WIDTH + 1)
    return max(20, min(_MOST, width - _BEFORE_CHANGE - figures - 1))


def change(frame: Frame, entry: KnobsChanged, width: int) -> list[Cell]:
    """Return the row of a knob change, with latencies before and after it (`!`: late)."""
    room = _change_width(width)
    cells = _row(
        frame, f"{entry.effective_step:,}", entry, changes_text(entry.old, entry.new, room)
    )
    slo = frame.history.slo
    effect = effect_of(frame.history, entry, frame.state.time_ns)
    if effect.is_blank:
        forms = (f"  {effect.missing}", effect.missing, effect.gist)
        is_last = len(_shown(width)) == 1  # then the text must fit into its column
        left = _FIGURE_WIDTH if is_last else width - _BEFORE_CHANGE - room - 1
        return [*cells, (fmt.first_fitting(forms, left), "muted")]
    for at in _shown(width):
        before, after = effect.figures[at]
        bound = slo.itl_ms if FIGURES[at][0] == "itl" else slo.ttft_ms
        late = after is not None and after > bound
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
    who = shorter_who(entry.who if isinstance(entry, KnobsChanged) else who_text(entry), _WHO_WIDTH)
    return [
        (step, style),
        (fmt.clock(frame.history.wall_ns(entry.time_ns)), "muted"),
        (clean(who, _WHO_WIDTH), "text"),
        (what, "mark" if is_change else style),
    ]


def about(frame: Frame, entry: Entry, width: int, *, is_ahead: bool) -> str:
    if not isinstance(entry, KnobsChanged):
        text = change_text(entry)
        return fmt.first_fitting((f"{who_text(entry)}: {text}", text), width)
    missing = "" if is_ahead else effect_of(frame.history, entry, frame.state.time_ns).missing
    end = missing and f"; {missing}"
    full = changes_text(entry.old, entry.new)
    short = changes_text(entry.old, entry.new, width - len(end))
    return fmt.first_fitting((f"{entry.who}: {full}{end}", f"{full}{end}", f"{short}{end}"), width)


EFFECT_S = 10.0  # seconds before and after a change, less if another change is nearer

# One token of several hundred is beyond a p99: only the longest wait shows a freeze.
FIGURES: tuple[tuple[LatencyKind, str], ...] = (
    ("itl", "p50"),
    ("itl", "p99"),
    ("itl", "max"),
    ("ttft", "p50"),
    ("ttft", "p99"),
)

BeforeAfter: TypeAlias = tuple[float | None, float | None]


class KnobEffect(NamedTuple):
    figures: list[BeforeAfter]  # in ms, for each of `FIGURES`; None if unknown
    missing: str  # why some latencies are unknown; empty if all are known
    gist: str  # that reason in two or three words

    @property
    def is_blank(self) -> bool:
        return all(value is None for pair in self.figures for value in pair)


def effect_of(history: History, change: KnobsChanged, now_ns: int) -> KnobEffect:
    """Return the latencies around a knob change, as far as they are known at `now_ns`."""
    changes = history.knob_changes
    if change not in changes:
        nothing: list[BeforeAfter] = [(None, None)] * len(FIGURES)
        return KnobEffect(nothing, "older than memory", "too long ago")
    at = changes.index(change)
    earlier = changes[at - 1].time_ns if at else 0
    later = changes[at + 1].time_ns if at + 1 < len(changes) else None
    width_ns = round(EFFECT_S * 1e9)
    begin_ns = max(change.time_ns - width_ns, earlier)
    end_ns, until = change.time_ns + width_ns, f"in the {EFFECT_S:g} s after"
    if later is not None and later < end_ns:
        end_ns, until = later, "up to the next change"
    if now_ns < end_ns:
        end_ns, until = now_ns, "since"
    before = history.windows.latency(change.time_ns, (change.time_ns - begin_ns) / 1e9, 1)
    after = history.windows.latency(end_ns, (end_ns - change.time_ns) / 1e9, 1)
    since = "before" if at == 0 or earlier < begin_ns else "after the change before"
    missing = [_missing(before, since), _missing(after, until)]
    gist = "unknown"
    if begin_ns < history.kept_from_ns and not before.step.num_samples:
        missing[0] = "before not in memory"
    elif all(not report.step.num_samples for report in (before, after)):
        missing, gist = [f"nothing ran {since}, nor {until}"], "nothing ran"
    return KnobEffect(
        [
            (
                getattr(getattr(before, kind), f"{rank}_ms"),
                getattr(getattr(after, kind), f"{rank}_ms"),
            )
            for kind, rank in FIGURES
        ],
        ", ".join(each for each in missing if each),
        gist,
    )


def _missing(report: LatencyReport, when: str) -> str:
    """Return why latencies are missing `when`; TTFT needs a first token then, ITL a second."""
    if not report.step.num_samples:
        return f"nothing ran {when}"
    tokens = {"first": report.ttft, "second": report.itl}
    without = [name for name, series in tokens.items() if not series.num_samples]
    if not without:
        return ""
    return f"no {without[0]} token {when}" if len(without) == 1 else f"no token {when}"
