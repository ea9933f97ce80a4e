"""The knobs page: a table of knobs, and the audit trail with the latencies around each change.

The table shows each knob's value, its bounds, and who changed it last.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.commands import SetKnobs
from stepscope.engine.protocol.wire import KnobsChanged, KnobSpec
from stepscope.recordings.state.audit_text import known_changes, shorter_who, value_text
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.framed_panels import Cell, Column, Rows, Target, room_of_last, table
from stepscope.tui.views.lines import Line, clean, facts, framed, titled
from stepscope.tui.views.pages import audit_rows
from stepscope.tui.views.pages.audit_rows import EFFECT_S, Entry
from stepscope.tui.views.panels.knob_panel import bounds_text, specs_of

_BOUNDS, _LAST, _HELP = " may be", "last changed", "what it does"


class _Trail(NamedTuple):
    """The audit trail at the cursor, newest first.

    `ahead`: what comes after the cursor in a replayed file, with its step; the latest first.
    """

    ahead: list[tuple[int, Entry]]
    entries: list[Entry]
    changes: list[KnobsChanged]  # those among `entries`

    @property
    def number(self) -> int:
        return len(self.ahead) + len(self.entries)

    def row(self, frame: Frame, at: int, width: int) -> list[Cell]:
        if at < len(self.ahead):
            return audit_rows.coming(frame, *self.ahead[at], width)
        entry = self.entries[at - len(self.ahead)]
        if isinstance(entry, KnobsChanged):
            return audit_rows.change(frame, entry, width)
        return audit_rows.audited(frame, entry)


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
    inner = width - 4
    log_height = max(5, min(trail.number + 3, height * 2 // 5))
    helps = "; ".join(f"{each.text} ({each.evidence})" for each in frame.advice)
    if not helps and frame.limits:
        helps = "no setting stands out in the last minute; 'stepscope tune' simulates others"
    advised = textwrap.wrap(f"what would help: {helps}", inner) if helps else []
    abouts = [textwrap.wrap(_about(each), inner) for each in specs.values()]
    num_about = max([1, *map(len, abouts)]) + len(advised)
    body_height = max(4 + num_about, min(len(names) + 3 + num_about, height - log_height))
    shown = max(0, body_height - 3 - num_about)
    which = "" if shown >= len(names) else f" ({shown} of {len(names)})"
    version = f"  version {frame.state.knobs_version}; * not the default" if names else ""
    change, undo = frame.key("inspect"), frame.key("undo")
    hint = "" if frame.is_replay else f"{change} changes one, {undo} takes your last one back"
    columns = _knob_columns(width)
    rooms = {each.name: each.width or room_of_last(columns, width - 2) for each in columns}
    knobs = [_knob(frame, name, specs.get(name), trail.changes, rooms) for name in names]
    chosen = row if row < len(names) else None
    body = table(columns, knobs, width - 2, body_height - 2 - num_about, chosen)
    if not names:
        body = [facts(" the engine does not report its knobs")]
    selected, about = None, ""
    if chosen is not None:
        about = _about(specs.get(names[chosen]))
    elif trail.number:
        selected = row - len(names)
        entries = [*(entry for _, entry in trail.ahead), *trail.entries]
        about = audit_rows.about(entries[min(selected, trail.number - 1)], inner)
    body = body[: body_height - 2 - num_about]
    body += [((f" {clean(each, inner)}", "mark"),) for each in advised]
    body += [facts(f" {clean(each, inner)}") for each in textwrap.wrap(about, inner)]
    lines = framed(
        body[: body_height - 2], width, body_height, titled(f"knobs{which}", version), hint
    )
    rest, ahead = height - body_height, len(trail.ahead)
    rows = Rows(trail.number, lambda at: trail.row(frame, at, width - 2))
    first = max(0, ahead - (rest - 3) // 3)
    log = table(
        audit_rows.columns(width - 2), rows, width - 2, rest - 2, selected, len(names), first
    )
    if not trail.number:
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


def _knob_columns(width: int) -> tuple[Column, ...]:
    columns = (
        Column("", 1),
        Column("knob", 28),
        Column("value", 12, True),
        Column("default", 12, True),
    )
    if width < 100:  # the text on the selected knob has its bounds
        return (*columns, Column(_LAST, 0))
    bounds = Column(_BOUNDS, 20 if width < 110 else 34 if width < 150 else 26)
    if width < 150:
        return (*columns, bounds, Column(_LAST, 0))
    return (*columns, bounds, Column(_LAST, 24), Column(_HELP, 0))


def _knob(
    frame: Frame,
    name: str,
    spec: KnobSpec | None,
    past: Sequence[KnobsChanged],
    rooms: Mapping[str, int],
) -> list[Cell]:
    """Return the table row of one knob; `rooms`: the widths of the columns."""
    value = frame.state.knobs.get(name)
    differs = spec is not None and value is not None and value != spec.default
    texts = {
        _BOUNDS: "" if spec is None else f" {bounds_text(spec, rooms.get(_BOUNDS, 0) - 1)}",
        _LAST: _last(frame, name, past, rooms[_LAST]),
        _HELP: "" if spec is None else fmt.whole_words(spec.help, rooms.get(_HELP, 0)),
    }
    return [
        ("*" if differs else " ", "mark"),
        (name, "strong"),
        (value_text(value), "mark" if differs else "text"),
        ("—" if spec is None else value_text(spec.default), "muted"),
        *((text, "muted") for column, text in texts.items() if column in rooms),
    ]


def _last(frame: Frame, name: str, past: Sequence[KnobsChanged], room: int) -> str:
    """Return when a knob was last changed, and by whom; empty if no change is known."""
    change = next((each for each in past if name in each.new), None)
    if change is None:
        return ""
    when, step = fmt.clock(frame.history.wall_ns(change.time_ns)), f"{change.effective_step:,}"
    short = f"{when} by {shorter_who(change.who, 0)}"
    minute = f"{when[:-3]} by {shorter_who(change.who, 0)}"
    forms = (f"{when} by {change.who}, from step {step}", f"{when} by {change.who}", short, minute)
    return fmt.first_fitting((*forms, when), room)


def _about(spec: KnobSpec | None) -> str:
    if spec is None:
        return "the engine does not describe it"
    return f"{spec.name}: {spec.help} (default {value_text(spec.default)}; {bounds_text(spec)})"


def _refused(frame: Frame) -> str:
    """Return how many commands the control socket refused, by reason; empty if that is unknown."""
    control = frame.state.control
    if control is None:
        return ""
    counts = {
        "bad": control.bad,
        "over the limit": control.limited,
        "of viewers": control.denied,
        "without a key": control.keyless,
    }
    refusals = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"  refused: {refusals}"
