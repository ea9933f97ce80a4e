"""Texts of knobs and their values, the same wherever they are shown."""

from collections.abc import Mapping

from stepscope.engine.protocol.wire import KnobValue

# Short names for narrow lines, the same as in key figures and screens.
_SHORT = {
    "max_num_batched_tokens": "budget",
    "max_num_seqs": "seats",
    "enable_chunked_prefill": "chunks",
    "long_prefill_token_threshold": "long prefill",
    "enable_prefix_caching": "prefix cache",
}


def value_text(value: KnobValue | None) -> str:
    """The value of a knob as screens show it: on or off for a bool, a dash for None."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def typed_text(value: KnobValue | None) -> str:
    """The value of a knob as a person types it for `stepscope set`, such as `true`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def changes_text(
    old: Mapping[str, KnobValue], new: Mapping[str, KnobValue], room: int | None = None
) -> str:
    """One line with all knob changes, each from its old to its new value.

    Args:
        room: terminal cells, or None for no limit. If the text is too long, names are shortened. If
            it is still too long, the last changes are only counted.
    """
    values = {
        name: f"{value_text(old.get(name))}→{value_text(value)}" for name, value in new.items()
    }
    text = ", ".join(f"{name} {value}" for name, value in values.items())
    if room is None or len(text) <= room:
        return text
    short = [f"{_SHORT.get(name, name)} {value}" for name, value in values.items()]
    for num_shown in range(len(short), 0, -1):
        more = [f"+{len(short) - num_shown} more"] if num_shown < len(short) else []
        text = ", ".join([*short[:num_shown], *more])
        if len(text) <= room:
            break
    return text
