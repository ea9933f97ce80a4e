"""Knobs: what they are, what they may be, who changed them, and what the latencies did after it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from stepscope.engine.commands import SetKnobs
from stepscope.engine.wire import Audited, KnobsChanged, KnobSpec
from stepscope.recordings.audit_text import change_text, who_text
from stepscope.recordings.knob_text import value_text
from stepscope.recordings.knob_trail import known_changes
from stepscope.tui import format as fmt
from stepscope.tui.frame import Frame
from stepscope.tui.widgets.knob_effect import EFFECT_S, effect_of
from stepscope.tui.widgets.knob_panel import bounds_text
from stepscope.tui.widgets.lines import Line, clean, framed
from stepscope.tui.widgets.panels import Cell, Column, Rows, Target, table

_WHO_WIDTH = 12


def _log_columns(width: int) -> tuple[Column, ...]:
    return (
        Column("step", 9, True),
        Column("at", 8),
        Column("by", _WHO_WIDTH),
        Column("change", max(20, min(90, width - 77 - _WHO_WIDTH))),
        Column("ITL p50", 12, True),
        Column("ITL p99", 12, True),
        Column("TTFT p50", 12, True),
        Column("TTFT p99", 12, True),
    )


def targets(frame: Frame) -> list[Target]:
    """One for each knob, then one for each line of the audit trail, the newest first."""
    knobs = [Target(knob=name) for name in _names(frame)]
    known = _known(frame)
    ahead = [Target(step=each.step) for each in _ahead(frame, known)]
    trail = _trail(frame, _past(frame, known))
    return [*knobs, *ahead, *(Target(step=_step(frame, entry)) for entry in trail)]


def draw(frame: Frame, width: int, height: int) -> list[Line]:
    """The whole page."""
    names = _names(frame)
    row = frame.view.row
    specs = _specs(frame)
    known = _known(frame)
    past = _past(frame, known)
    ahead, trail = _ahead(frame, known), _trail(frame, past)
    entries = [*(each.entry for each in ahead), *trail]
    log_height = max(5, min(len(entries) + 3, height * 2 // 5))
    body_height = max(5, min(len(names) + 4, height - log_height))
    shown = max(0, body_height - 4)
    title: Line = (
        ("knobs" if shown >= len(names) else f"knobs ({shown} of {len(names)})", "title"),
        (f"  version {frame.state.knobs_version}; ◆ not the default" if names else "", "muted"),
    )
    keys = frame.key("inspect"), frame.key("undo")
    said = "" if frame.is_replay else f"{keys[0]} changes one, {keys[1]} takes your last one back"
    hint: Line = ((said, "muted"),)
    chosen = row if row < len(names) else None
    body = table(
        _knob_columns(width),
        [_knob(frame, name, specs.get(name), past) for name in names],
        width - 2,
        body_height - 3,
        chosen,
    )
    if not names:
        body = [((" the engine does not tell its knobs", "muted"),)]
    selected = row - len(names) if row >= len(names) and entries else None
    about = "" if chosen is None else _about(specs.get(names[chosen]))
    if selected is not None:
        at = min(selected, len(entries) - 1)
        about = _told(entries[at])
        if at >= len(ahead):
            about += _missing(frame, entries[at])
    body = [*body[: body_height - 3], ((f" {clean(about, width - 4)}", "muted"),)]
    lines = framed(body, width, body_height, title, hint)
    rest = height - body_height

    def listed(at: int) -> list[Cell]:
        if at < len(ahead):
            return _coming(frame, ahead[at])
        entry = trail[at - len(ahead)]
        return _change(frame, entry) if isinstance(entry, KnobsChanged) else _audited(frame, entry)

    log = table(
        _log_columns(width),
        Rows(len(entries), listed),
        width - 2,
        rest - 2,
        selected,
        len(names),
        max(0, len(ahead) - (rest - 3) // 3),
    )
    if not entries:
        text = " nobody has changed anything"
        if not names:
            text = " nor whether any has been changed"
        log = [((text, "muted"),)]
    count = f" ({len(trail)})" if trail or names else ""
    order = ", newest first"
    if _is_longer(frame):
        count, order = f" ({len(trail)}; earlier: stepscope audit)", ""
    heading: Line = (
        (f"audit{count}", "title"),
        (f"  ms before→after, {EFFECT_S:g} s each{order}", "muted"),
        (_num_ahead(frame, ahead), "text"),
        (_refused(frame), "breach"),
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
        Column(" may be", 20 if width < 110 else 34 if width < 150 else 52),
    )
    if width < 150:
        return (*columns, Column("last changed", 0))
    return (*columns, Column("last changed", 36), Column("what it does", 0))


def _knob(
    frame: Frame, name: str, spec: KnobSpec | None, past: Sequence[KnobsChanged]
) -> list[Cell]:
    value = frame.state.knobs.get(name)
    differs = spec is not None and value is not None and value != spec.default
    return [
        ("◆" if differs else " ", "mark"),
        (name, "strong"),
        (value_text(value), "mark" if differs else "text"),
        ("—" if spec is None else value_text(spec.default), "muted"),
        ("" if spec is None else f" {bounds_text(spec)}", "muted"),
        (_last(frame, name, past), "muted"),
        ("" if spec is None else spec.help, "muted"),
    ]


def _last(frame: Frame, name: str, past: Sequence[KnobsChanged]) -> str:
    """Who changed it last; blank where nobody is known to have."""
    for change in past:
        if name in change.new:
            when = fmt.clock(frame.history.wall_ns(change.time_ns))
            return f"{when} by {change.who}, from step {change.effective_step:,}"
    return ""


def _about(spec: KnobSpec | None) -> str:
    if spec is None:
        return "the engine does not describe it"
    return f"{spec.name}: {spec.help} (default {value_text(spec.default)}; {bounds_text(spec)})"


# The audit trail: changes of knobs with what came of them, and whatever else somebody did

_Entry: TypeAlias = KnobsChanged | Audited


class _Ahead(NamedTuple):
    """What lies ahead in a replayed file, and where."""

    step: int
    entry: _Entry


def _trail(frame: Frame, past: Sequence[KnobsChanged]) -> list[_Entry]:
    """Up to the cursor, the newest first."""
    others = [
        entry for entry in frame.state.audit if entry.code or entry.command != SetKnobs.__name__
    ]
    return sorted([*past, *others], key=lambda entry: -entry.time_ns)


def _is_longer(frame: Frame) -> bool:
    """Whether the engine's trail begins before the one that is known here."""
    audit = frame.state.audit
    return bool(audit) and audit[0].number > 1


def _step(frame: Frame, entry: _Entry) -> int | None:
    """Where it is shown; for what was refused, the step it was asked in."""
    if entry.effective_step is not None:
        return entry.effective_step
    return frame.history.step_at(entry.time_ns)


def _told(entry: _Entry) -> str:
    return _what(entry) if isinstance(entry, KnobsChanged) else change_text(entry)


def _audited(frame: Frame, entry: Audited) -> list[Cell]:
    style = "breach" if entry.code else "text"
    return [
        ("refused" if entry.code else f"{entry.effective_step or 0:,}", style),
        (fmt.clock(frame.history.wall_ns(entry.time_ns)), "muted"),
        (clean(who_text(entry), _WHO_WIDTH), "text"),
        (change_text(entry), style),
    ]


def _num_ahead(frame: Frame, ahead: Sequence[_Ahead]) -> str:
    """How many of a replayed file are still to come, and the key that goes to the next one."""
    return f"; {len(ahead):,} ahead ({frame.key('next_event')})" if ahead else ""


def _refused(frame: Frame) -> str:
    """What the control socket did not take, when it did not take something."""
    control = frame.state.control
    if control is None:
        return ""
    counts = {
        "bad": control.bad,
        "over the limit": control.limited,
        "of viewers": control.denied,
        "without a key": control.keyless,
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"  refused: {told}"


def _known(frame: Frame) -> list[KnobsChanged]:
    """The newest first; of a replayed file all."""
    changes = known_changes(frame.history.knob_changes, frame.state.audit, frame.changes_in_file)
    return changes[::-1]


def _past(frame: Frame, known: Sequence[KnobsChanged]) -> Sequence[KnobsChanged]:
    """Up to the cursor."""
    cursor = frame.cursor
    if cursor is None or (frame.view.live and not frame.is_replay):
        return known
    return [change for change in known if change.effective_step <= cursor]


def _ahead(frame: Frame, known: Sequence[KnobsChanged]) -> list[_Ahead]:
    """Of a replayed file what lies after the cursor, the farthest first."""
    cursor = frame.cursor
    if cursor is None or not frame.is_replay:
        return []
    told = [each for each in frame.told_in_file if each.entry not in frame.state.audit]
    both = [_Ahead(change.effective_step, change) for change in known]
    both += [_Ahead(*each) for each in told]
    return sorted([each for each in both if each.step > cursor], key=lambda each: -each.step)


def _what(change: KnobsChanged) -> str:
    return ", ".join(
        f"{name} {value_text(change.old.get(name))}→{value_text(value)}"
        for name, value in change.new.items()
    )


def _change(frame: Frame, change: KnobsChanged) -> list[Cell]:
    cells: list[Cell] = [
        (f"{change.effective_step:,}", "text"),
        (fmt.clock(frame.history.wall_ns(change.time_ns)), "muted"),
        (clean(change.who, _WHO_WIDTH), "text"),
        (_what(change), "mark"),
    ]
    slo = frame.history.slo
    effect = effect_of(frame.history, change, frame.state.time_ns)
    if effect.is_blank:
        return [*cells, (f"  {effect.missing}", "muted")]
    bounds = (slo.itl_ms, slo.itl_ms, slo.ttft_ms, slo.ttft_ms)
    for (before, after), bound in zip(effect.figures, bounds, strict=True):
        late = after is not None and after > bound
        text = f"{fmt.milliseconds(before)}→{fmt.milliseconds(after)}{'!' if late else ' '}"
        cells.append((text, "breach" if late else "text"))
    return cells


def _missing(frame: Frame, entry: _Entry) -> str:
    """Why latencies before or after a change of knobs are not known, to follow what was changed."""
    if not isinstance(entry, KnobsChanged):
        return ""
    missing = effect_of(frame.history, entry, frame.state.time_ns).missing
    return missing and f"; {missing}"


def _coming(frame: Frame, ahead: _Ahead) -> list[Cell]:
    """What it did to the latencies is not known before it is played."""
    step, entry = ahead
    who = entry.who if isinstance(entry, KnobsChanged) else who_text(entry)
    return [
        (f"{step:,}", "muted"),
        (fmt.clock(frame.history.wall_ns(entry.time_ns)), "muted"),
        (clean(who, _WHO_WIDTH), "muted"),
        (f"ahead: {_told(entry)}", "muted"),
    ]
