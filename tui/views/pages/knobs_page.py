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
from stepscope.tui.views.lines import Line, clean, framed
from stepscope.tui.views.pages import audit_rows
from stepscope.tui.views.pages.audit_rows import EFFECT_S, Entry
from stepscope.tui.views.panels.knob_panel import bounds_text

_BOUNDS, _LAST, _HELP = " may be", "last changed", "what it does"


def targets(frame: Frame) -> list[Target]:
    """Return a target for each knob, then one for each line of the audit trail, newest first."""
    knobs = [Target(knob=name) for name in _names(frame)]
    known = _known(frame)
    ahead = [Target(step=each.step) for each in _ahead(frame, known)]
    trail = _trail(frame, _past(frame, known))
    return [*knobs, *ahead, *(Target(step=_step(frame, entry)) for entry in trail)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    names = _names(frame)
    row = frame.view.row
    specs = _specs(frame)
    known = _known(frame)
    past = _past(frame, known)
    ahead, trail = _ahead(frame, known), _trail(frame, past)
    entries = [*(each.entry for each in ahead), *trail]
    log_height = max(5, min(len(entries) + 3, height * 2 // 5))
    helps = "; ".join(f"{each.text} ({each.evidence})" for each in frame.advice)
    if not helps and frame.limits:
        helps = "no setting stands out in the last minute; 'stepscope tune' simulates others"
    advised = [
        ((f" {clean(each, width - 4)}", "mark"),)
        for each in _wrapped(f"what would help: {helps}" if helps else "", width)
    ]
    num_about = max([1, *(len(_wrapped(_about(each), width)) for each in specs.values())])
    num_about += len(advised)
    body_height = max(4 + num_about, min(len(names) + 3 + num_about, height - log_height))
    shown = max(0, body_height - 3 - num_about)
    title: Line = (
        ("knobs" if shown >= len(names) else f"knobs ({shown} of {len(names)})", "title"),
        (f"  version {frame.state.knobs_version}; * not the default" if names else "", "muted"),
    )
    keys = frame.key("inspect"), frame.key("undo")
    said = "" if frame.is_replay else f"{keys[0]} changes one, {keys[1]} takes your last one back"
    hint: Line = ((said, "muted"),)
    chosen = row if row < len(names) else None
    columns = _knob_columns(width)
    rooms = {each.name: each.width or room_of_last(columns, width - 2) for each in columns}
    body = table(
        columns,
        [_knob(frame, name, specs.get(name), past, rooms) for name in names],
        width - 2,
        body_height - 2 - num_about,
        chosen,
    )
    if not names:
        body = [((" the engine does not report its knobs", "muted"),)]
    selected = row - len(names) if row >= len(names) and entries else None
    about = "" if chosen is None else _about(specs.get(names[chosen]))
    if selected is not None:
        at = min(selected, len(entries) - 1)
        about = audit_rows.about(frame, entries[at], width - 4, is_ahead=at < len(ahead))
    lines_about = [((f" {clean(each, width - 4)}", "muted"),) for each in _wrapped(about, width)]
    body = [*body[: body_height - 2 - num_about], *advised, *lines_about][: body_height - 2]
    lines = framed(body, width, body_height, title, hint)
    rest = height - body_height

    def listed(at: int) -> list[Cell]:
        if at < len(ahead):
            return audit_rows.coming(frame, *ahead[at], width - 2)
        entry = trail[at - len(ahead)]
        if isinstance(entry, KnobsChanged):
            return audit_rows.change(frame, entry, width - 2)
        return audit_rows.audited(frame, entry)

    log = table(
        audit_rows.columns(width - 2),
        Rows(len(entries), listed),
        width - 2,
        rest - 2,
        selected,
        len(names),
        max(0, len(ahead) - (rest - 3) // 3),
    )
    if not entries:
        text = " no changes yet"
        if not names:
            text = " no knob changes reported either"
        log = [((text, "muted"),)]
    count = f" ({len(trail)})" if trail or names else ""
    order = ", newest first"
    if frame.state.audit and frame.state.audit[0].number > 1:
        count, order = f" ({len(trail)}; earlier: snapshot --audit)", ""
    heading: Line = (
        (f"audit{count}", "title"),
        (f"  ms before→after, {EFFECT_S:g} s each{order}", "muted"),
        (f"; {len(ahead):,} ahead ({frame.key('next_event')})" if ahead else "", "text"),
        (_refused(frame), "caution"),
    )
    hint = ((f"{frame.key('inspect')} goes there", "muted"),)
    return [*lines, *framed(log, width, rest, heading, hint)]


def _names(frame: Frame) -> list[str]:
    return list(dict.fromkeys([*_specs(frame), *frame.state.knobs]))


def _specs(frame: Frame) -> Mapping[str, KnobSpec]:
    info = frame.state.info
    return {} if info is None else {spec.name: spec for spec in info.knobs}


def _knob_columns(width: int) -> tuple[Column, ...]:
    columns = (
        Column("", 1),
        Column("knob", 28),
        Column("value", 12, True),
        Column("default", 12, True),
    )
    if width < 100:  # the text on the selected knob has its bounds
        return (*columns, Column(_LAST, 0))
    bounds = Column(
        _BOUNDS, 20 if width < 110 else 34 if width < 150 else 26 if width < 230 else 52
    )
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
    for change in past:
        if name in change.new:
            when = fmt.clock(frame.history.wall_ns(change.time_ns))
            step = f", from step {change.effective_step:,}"
            who = f" by {shorter_who(change.who, 0)}"
            full, short, minute = f"{when} by {change.who}", when + who, when[:-3] + who
            return fmt.first_fitting((full + step, short + step, full, short, minute, when), room)
    return ""


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width - 4)


def _about(spec: KnobSpec | None) -> str:
    if spec is None:
        return "the engine does not describe it"
    return f"{spec.name}: {spec.help} (default {value_text(spec.default)}; {bounds_text(spec)})"


# The audit trail: changes of knobs with their effect, and all other commands


class _Ahead(NamedTuple):
    """An entry of the audit trail that comes after the cursor in a replayed file, and its step."""

    step: int
    entry: Entry


def _trail(frame: Frame, past: Sequence[KnobsChanged]) -> list[Entry]:
    others = [
        entry for entry in frame.state.audit if entry.code or entry.command != SetKnobs.__name__
    ]
    return sorted([*past, *others], key=lambda entry: -entry.time_ns)


def _step(frame: Frame, entry: Entry) -> int | None:
    """Return the step at which an entry took effect; of a refused one, the step before."""
    if entry.effective_step is not None:
        return entry.effective_step
    return frame.history.step_at(entry.time_ns)


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


def _known(frame: Frame) -> list[KnobsChanged]:
    changes = known_changes(frame.history.knob_changes, frame.state.audit, frame.changes_in_file)
    return changes[::-1]


def _past(frame: Frame, known: Sequence[KnobsChanged]) -> Sequence[KnobsChanged]:
    cursor = frame.cursor
    if cursor is None or (frame.view.live and not frame.is_replay):
        return known
    return [change for change in known if change.effective_step <= cursor]


def _ahead(frame: Frame, known: Sequence[KnobsChanged]) -> list[_Ahead]:
    """Return the entries of a replayed file that come after the cursor, the latest first."""
    cursor = frame.cursor
    if cursor is None or not frame.is_replay:
        return []
    other = [each for each in frame.audited_in_file if each.entry not in frame.state.audit]
    both = [_Ahead(change.effective_step, change) for change in known]
    both += [_Ahead(*each) for each in other]
    return sorted([each for each in both if each.step > cursor], key=lambda each: -each.step)
