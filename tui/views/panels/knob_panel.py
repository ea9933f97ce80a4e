"""The knobs at the cursor, and who made the last change."""

from stepscope.engine.protocol.wire import KnobSpec
from stepscope.recordings.state.audit_text import known_changes, shorter_who, value_text
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, Run, clean, framed, spot


def bounds_text(spec: KnobSpec, room: int | None = None) -> str:
    """Return the values that a knob accepts; choices that do not fit are counted."""
    if spec.kind == "choice":
        text = " | ".join(spec.choices)
        for num_shown in range(len(spec.choices) - 1, 0, -1):
            if room is None or len(text) <= room:
                return text
            shown = [*spec.choices[:num_shown], f"+{len(spec.choices) - num_shown} more"]
            text = " | ".join(shown)
        fits = room is None or len(text) <= room
        return text if fits else f"{len(spec.choices)} choices"
    if spec.kind == "bool":
        return "on | off"
    low = "" if spec.low is None else f"{spec.low:g}"
    high = "" if spec.high is None else f"{spec.high:g}"
    return f"{low}..{high}"


def draw(frame: Frame, width: int, height: int, pending: str, editable: bool) -> list[Line]:
    """Return the panel, `width` x `height`; `pending`: commands without an answer yet."""
    state = frame.state
    specs = {} if state.info is None else {spec.name: spec for spec in state.info.knobs}
    body: list[Line] = []
    for name in dict.fromkeys([*specs, *state.knobs]):
        spec, value = specs.get(name), state.knobs.get(name)
        changed = spec is not None and value is not None and value != spec.default
        bounds = "" if spec is None else bounds_text(spec, width - 46)
        body.append(
            (
                spot("knob", name),
                (f" {clean(name, 28):<28} ", "text"),
                (f"{value_text(value):>12}", "mark" if changed else "strong"),
                (f"  {clean(bounds, max(0, width - 46))}", "muted"),
            )
        )
    if not body:
        body = [((" the engine does not report its knobs", "muted"),)]
    footer: list[Run] = [(" pending: ", "muted"), (clean(pending or "none", 30), "text")]
    if state.leased is not None:
        who = clean(shorter_who(state.leased.who, 12), 12)
        ends = f", {frame.key('autopilot')} ends it" if editable else ""
        footer.append((f"  autopilot of {who}{ends}", "mark"))
    changes = known_changes(frame.history.knob_changes, frame.state.audit)
    at = frame.cursor if frame.cursor is not None else -1
    earlier = [change for change in changes if change.effective_step <= at]
    if earlier:
        last = earlier[-1]
        when = fmt.clock(frame.history.wall_ns(last.time_ns))
        footer.append((f"  last: {when} by {clean(shorter_who(last.who, 12), 12)}", "muted"))
    title: Line = (
        ("knobs", "title"),
        (f" ({frame.key('knobs')} to edit)" if editable else "", "muted"),
    )
    return framed([*body[: height - 3], tuple(footer)], width, height, title)
