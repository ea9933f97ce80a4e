"""The knobs at the cursor, and who made the last change."""

from collections.abc import Mapping

from stepscope.engine.protocol.wire import KnobSpec
from stepscope.recordings.state.audit_text import known_changes, shorter_who, value_text
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, Run, clean, facts, framed, spot, titled


def specs_of(frame: Frame) -> Mapping[str, KnobSpec]:
    info = frame.state.info
    return {} if info is None else {spec.name: spec for spec in info.knobs}


def bounds_text(spec: KnobSpec, room: int | None = None) -> str:
    """Return the values that a knob accepts; choices that do not fit are counted."""
    if spec.kind == "choice":
        num = len(spec.choices)
        forms = [" | ".join(spec.choices)]
        for num_shown in range(num - 1, 0, -1):
            forms.append(" | ".join([*spec.choices[:num_shown], f"+{num - num_shown} more"]))
        return fmt.first_fitting((*forms, f"{num} choices"), 10_000 if room is None else room)
    if spec.kind == "bool":
        return "on | off"
    low, high = ("" if bound is None else f"{bound:g}" for bound in (spec.low, spec.high))
    return f"{low}..{high}"


def draw(frame: Frame, width: int, height: int, pending: str, editable: bool) -> list[Line]:
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
        who = clean(shorter_who(state.leased.who, 12), 12)
        ends = f", {frame.key('autopilot')} ends it" if editable else ""
        footer = (*footer, (f"  autopilot of {who}{ends}", "mark"))
    changes = known_changes(frame.history.knob_changes, frame.state.audit)
    at = frame.cursor if frame.cursor is not None else -1
    earlier = [change for change in changes if change.effective_step <= at]
    if earlier:
        when = fmt.clock(frame.history.wall_ns(earlier[-1].time_ns))
        who = clean(shorter_who(earlier[-1].who, 12), 12)
        footer = (*footer, (f"  last: {when} by {who}", "muted"))
    title = titled("knobs", f" ({frame.key('knobs')} to edit)" if editable else "")
    return framed([*body[: height - 3], footer], width, height, title)
