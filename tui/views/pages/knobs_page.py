"""The knobs, as a panel and as a page: also the audit trail with the latencies around each change.

The table shows each knob's value, its bounds, and who changed it last.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from stepscope.engine.protocol.commands import SetKnobs
from stepscope.engine.protocol.wire import Audited, KnobsChanged, KnobSpec
from stepscope.recordings.history.history import History
from stepscope.recordings.session.regression import LEAST_S
from stepscope.recordings.state.audit_text import (
    change_text,
    changes_text,
    known_changes,
    shorter_who,
    value_text,
    who_text,
)
from stepscope.recordings.state.latency import LatencyReport
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import LATENCY_WINDOW_S, Frame
from stepscope.tui.views.framed_panels import Column, Rows, Target, room_of_last, table
from stepscope.tui.views.lines import Line, Run, bounded, clean, facts, framed, spot, titled

Entry: TypeAlias = KnobsChanged | Audited

EFFECT_S = 10.0  # seconds before and after a change, less if another change is nearer
_KNOB = (Column("", 1), Column("knob", 28), Column("value", 12, True), Column("default", 12, True))
_WHO_WIDTH = 12
_BEFORE_CHANGE = 1 + 10 + 9 + _WHO_WIDTH + 1  # cells left of the change, with blanks between
_FIGURE_WIDTH = 12
_LEAST, _MOST = 32, 90  # least and most cells of the change
# Which figures to show if there is little room, most important first: the longest wait shows what
# p99 does not. The p50 of ITL says least, because most steps are the same before and after.
_FIGURES = (("itl", "max"), ("itl", "p99"), ("ttft", "p99"), ("ttft", "p50"), ("itl", "p50"))


class _Trail(NamedTuple):
    """The audit trail at the cursor, newest first.

    `ahead`: what comes after the cursor in a replayed file, with its step; the latest first.
    """

    ahead: list[tuple[int, Entry]]
    entries: list[Entry]
    changes: list[KnobsChanged]  # those among `entries`

    @property
    def all(self) -> list[Entry]:
        return [*(entry for _, entry in self.ahead), *self.entries]

    def row(self, frame: Frame, at: int, width: int) -> list[Run]:
        if at < len(self.ahead):
            return _coming(frame, *self.ahead[at], width)
        entry = self.entries[at - len(self.ahead)]
        if isinstance(entry, KnobsChanged):
            return _changed(frame, entry, width)
        step = "refused" if entry.code else f"{entry.effective_step or 0:,}"
        return _audit_row(frame, step, entry, change_text(entry))


def _trail(frame: Frame) -> _Trail:
    state, cursor = frame.state, frame.cursor
    known = known_changes(frame.history.knob_changes, state.audit, frame.changes_in_file)[::-1]
    ahead: list[tuple[int, Entry]] = []
    past = known
    if cursor is not None and frame.is_replay:
        other = [each for each in frame.audited_in_file if each.entry not in state.audit]
        ahead = [(each.step, each.entry) for each in other if each.step > cursor]
        ahead += [(each.effective_step, each) for each in known if each.effective_step > cursor]
        ahead.sort(key=lambda each: -each[0])
    if cursor is not None and (frame.is_replay or not frame.view.live):
        past = [change for change in known if change.effective_step <= cursor]
    others = [each for each in state.audit if each.code or each.command != SetKnobs.__name__]
    return _Trail(ahead, sorted([*past, *others], key=lambda each: -each.time_ns), past)


def targets(frame: Frame) -> list[Target]:
    """Return a target for each knob, then one for each line of the audit trail, newest first."""
    trail = _trail(frame)
    steps: list[int | None] = [step for step, _ in trail.ahead]
    for entry in trail.entries:  # of a refused one, the step before it
        step = entry.effective_step
        steps.append(frame.history.step_at(entry.time_ns) if step is None else step)
    return [*(Target(knob=name) for name in _names(frame)), *(Target(step=each) for each in steps)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    names, specs, trail, row = _names(frame), specs_of(frame), _trail(frame), frame.view.row
    inner, commands, ahead = width - 4, trail.all, len(trail.ahead)
    log_height = max(5, min(len(commands) + 3, height * 2 // 5))
    helps = "; ".join(f"{each.text} ({each.evidence})" for each in frame.advice)
    if not helps and frame.limits:
        is_long = frame.known_s(LATENCY_WINDOW_S) >= LEAST_S
        others = "; 'stepscope tune' simulates others" if is_long else ""
        helps = f"no setting stands out in the last minute{others}"
    advised = textwrap.wrap(f"what would help: {helps}", inner) if helps else []
    abouts = [textwrap.wrap(_about(each), inner) for each in specs.values()]
    num_about = max([1, *map(len, abouts)]) + len(advised)
    body_height = max(4 + num_about, min(len(names) + 3 + num_about, height - log_height))
    shown = max(0, body_height - 3 - num_about)
    which = "" if shown >= len(names) else f" ({shown} of {len(names)})"
    version = f"  version {frame.state.knobs_version}; * not the default" if names else ""
    change, undo = frame.key("inspect"), frame.key("undo")
    hint = "" if frame.is_replay else f"{change} changes one, {undo} takes your last one back"
    # On a narrow screen only the text on the selected knob has its bounds.
    bounds_room = 0 if width < 100 else 20 if width < 110 else 34
    bounds = [Column(" may be", bounds_room)] if bounds_room else []
    columns = (*_KNOB, *bounds, Column("last changed", 0))
    knobs = []
    for name in names:
        last = _last(frame, name, trail.changes, room_of_last(columns, width - 2))
        knobs.append([*_knob(frame, name, specs.get(name), bounds_room), (last, "muted")])
    chosen = row if row < len(names) else None
    body = table(columns, knobs, width - 2, body_height - 2 - num_about, chosen)
    if not names:
        body = [facts(" the engine does not report its knobs")]
    selected, about = None, ""
    if chosen is not None:
        about = _about(specs.get(names[chosen]))
    elif commands:
        selected = row - len(names)
        about = _about_entry(commands[min(selected, len(commands) - 1)], inner)
    body = body[: body_height - 2 - num_about]
    body += [((f" {clean(each, inner)}", "mark"),) for each in advised]
    body += [facts(f" {clean(each, inner)}") for each in textwrap.wrap(about, inner)]
    title = titled(f"knobs{which}", version)
    lines = framed(body[: body_height - 2], width, body_height, title, hint)
    rest = height - body_height
    rows = Rows(len(commands), lambda at: trail.row(frame, at, width - 2))
    first = max(0, ahead - (rest - 3) // 3)
    log = table(_audit_columns(width - 2), rows, width - 2, rest - 2, selected, len(names), first)
    if not commands:
        log = [facts(" no changes yet" if names else " no knob changes reported either")]
    number = len(trail.entries)
    count, order = f" ({number})" if number or names else "", ", newest first"
    if frame.state.audit and frame.state.audit[0].number > 1:
        count, order = f" ({number}; earlier: snapshot --audit)", ""
    heading: Line = (
        *titled(f"audit{count}", f"  ms before→after, {EFFECT_S:g} s each{order}"),
        (f"; {ahead:,} ahead ({frame.key('next_event')})" if ahead else "", "text"),
        (_refused(frame), "caution"),
    )
    return [*lines, *framed(log, width, rest, heading, f"{frame.key('inspect')} goes there")]


def _names(frame: Frame) -> list[str]:
    return list(dict.fromkeys([*specs_of(frame), *frame.state.knobs]))


def _knob(frame: Frame, name: str, spec: KnobSpec | None, bounds_room: int) -> list[Run]:
    value = frame.state.knobs.get(name)
    differs = spec is not None and value is not None and value != spec.default
    bounds = "" if spec is None else f" {bounds_text(spec, bounds_room - 1)}"
    return [
        ("*" if differs else " ", "mark"),
        (name, "strong"),
        (value_text(value), "mark" if differs else "text"),
        ("—" if spec is None else value_text(spec.default), "muted"),
        *([(bounds, "muted")] if bounds_room else []),
    ]


def _last(frame: Frame, name: str, past: Sequence[KnobsChanged], room: int) -> str:
    change = next((each for each in past if name in each.new), None)
    if change is None:
        return ""
    when, step = frame.clock(change.time_ns), f"{change.effective_step:,}"
    short = f"{when} by {shorter_who(change.who, 0)}"
    minute = f"{when[:-3]} by {shorter_who(change.who, 0)}"
    forms = (f"{when} by {change.who}, from step {step}", f"{when} by {change.who}", short, minute)
    return fmt.first_fitting((*forms, when), room)


def _about(spec: KnobSpec | None) -> str:
    if spec is None:
        return "the engine does not describe it"
    return f"{spec.name}: {spec.help} (default {value_text(spec.default)}; {bounds_text(spec)})"


def _refused(frame: Frame) -> str:
    if (control := frame.state.control) is None:
        return ""
    counts = {
        "bad": control.bad,
        "over the limit": control.limited,
        "of viewers": control.denied,
        "without a key": control.keyless,
    }
    return "  refused: " + ", ".join(f"{n:,} {what}" for what, n in counts.items() if n)


def _shown_figures(width: int) -> list[tuple[str, str]]:
    """Return the figures that a table of this width has room for, ITL first, the longest last."""
    room = (width - _BEFORE_CHANGE - _LEAST) // (_FIGURE_WIDTH + 1)
    return sorted(_FIGURES[: max(1, room)], key=lambda each: (each[0], each[1] == "max", each[1]))


def _change_width(width: int) -> int:
    figures = len(_shown_figures(width)) * (_FIGURE_WIDTH + 1)
    return max(20, min(_MOST, width - _BEFORE_CHANGE - figures - 1))


def _audit_columns(width: int) -> tuple[Column, ...]:
    names = (f"{kind.upper()} {rank}" for kind, rank in _shown_figures(width))
    return (
        Column("step", 9, True),
        Column("at", 8),
        Column("by", _WHO_WIDTH),
        Column("change", _change_width(width)),
        *(Column(name, _FIGURE_WIDTH, True) for name in names),
    )


def _changed(frame: Frame, entry: KnobsChanged, width: int) -> list[Run]:
    """Return the row of a knob change, with latencies before and after it (`!`: late)."""
    what = changes_text(entry.old, entry.new, _change_width(width))
    cells, slo = _audit_row(frame, f"{entry.effective_step:,}", entry, what), frame.history.slo
    effect = effect_of(frame.history, entry, frame.state.time_ns)
    if effect is None or all(not report.step.num_samples for report in effect):
        return [*cells, ("unknown", "muted")]
    for kind, rank in _shown_figures(width):
        before, after = (getattr(getattr(report, kind), f"{rank}_ms") for report in effect)
        text = f"{fmt.milliseconds(before)}→{fmt.milliseconds(after)}"
        cells.append(bounded(text, after, slo.itl_ms if kind == "itl" else slo.ttft_ms, " "))
    return cells


def _coming(frame: Frame, step: int, entry: Entry, width: int) -> list[Run]:
    """Return the row of a command after the cursor in a replayed file, without effect yet."""
    what = "ahead: "
    if isinstance(entry, KnobsChanged):
        what += changes_text(entry.old, entry.new, width - _BEFORE_CHANGE - len(what))
    else:
        what += change_text(entry)
    return [(text, "muted") for text, _ in _audit_row(frame, f"{step:,}", entry, what)]


def _audit_row(frame: Frame, step: str, entry: Entry, what: str) -> list[Run]:
    if isinstance(entry, KnobsChanged):
        who, style, what_style = entry.who, "text", "mark"
    else:
        who, style = who_text(entry), "caution" if entry.code else "text"
        what_style = style
    when = frame.clock(entry.time_ns)
    by = shorter_who(who, _WHO_WIDTH)
    return [(step, style), (when, "muted"), (by, "text"), (what, what_style)]


def _about_entry(entry: Entry, width: int) -> str:
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


def specs_of(frame: Frame) -> Mapping[str, KnobSpec]:
    info = frame.state.info
    return {} if info is None else {spec.name: spec for spec in info.knobs}


def bounds_text(spec: KnobSpec, room: int = 10_000) -> str:
    """Return the values that a knob accepts; choices that do not fit are counted."""
    if spec.kind == "choice":
        num = len(spec.choices)
        forms = [" | ".join(spec.choices)]
        for num_shown in range(num - 1, 0, -1):
            forms.append(" | ".join([*spec.choices[:num_shown], f"+{num - num_shown} more"]))
        return fmt.first_fitting((*forms, f"{num} choices"), room)
    if spec.kind == "bool":
        return "on | off"
    low, high = ("" if bound is None else f"{bound:g}" for bound in (spec.low, spec.high))
    return f"{low}..{high}"


def panel(frame: Frame, width: int, height: int, pending: str, editable: bool) -> list[Line]:
    """Return the panel, `width` x `height`; `pending`: commands without an answer yet."""
    state, specs, room = frame.state, specs_of(frame), max(0, width - 46)
    body: list[Line] = []
    for name in dict.fromkeys([*specs, *state.knobs]):
        spec, value = specs.get(name), state.knobs.get(name)
        changed = spec is not None and value is not None and value != spec.default
        bounds = "" if spec is None else bounds_text(spec, room)
        shown: Run = (f"{value_text(value):>12}", "mark" if changed else "strong")
        label: Run = (f" {clean(name, 28):<28} ", "text")
        body.append((spot("knob", name), label, shown, (f"  {clean(bounds, room)}", "muted")))
    if not body:
        body = [facts(" the engine does not report its knobs")]
    footer = facts(" pending: ", clean(pending or "none", 30))
    if state.leased is not None:
        who = clean(shorter_who(state.leased.who, 16), 16)
        ends = f", {frame.key('autopilot')} ends it" if editable else ""
        footer = (*footer, (f"  autopilot of {who}{ends}", "mark"))
    changes = known_changes(frame.history.knob_changes, state.audit)
    at = -1 if frame.cursor is None else frame.cursor
    if earlier := [change for change in changes if change.effective_step <= at]:
        when = frame.clock(earlier[-1].time_ns)
        who = clean(shorter_who(earlier[-1].who, 16), 16)
        footer = (*footer, (f"  last: {when} by {who}", "muted"))
    title = titled("knobs", f" ({frame.key('knobs')} to edit)" if editable else "")
    return framed([*body[: height - 3], footer], width, height, title)
