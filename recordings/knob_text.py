"""Values of knobs in words, the same wherever they are shown."""

from stepscope.engine.wire import KnobValue


def value_text(value: KnobValue | None) -> str:
    """As a person reads it; a dash for what is not known."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def typed_text(value: KnobValue | None) -> str:
    """As `stepscope set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
