"""Changes of knobs, as the user types them: `KNOB=VALUE` words.

Words are one change together. Commas or a range in a value make variants of that knob, where a
command takes variants.
"""

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import KnobValue
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

Variant: TypeAlias = tuple[str, dict[str, KnobValue]]
"""A text for people, and the values of the knobs that differ."""

_MAX_RANGE = 8
_MAX_VARIANTS = 32


def knob_texts(words: Sequence[str], example: str) -> dict[str, str]:
    """Return knob -> what follows its `=`, with its commas. The names are not checked."""
    texts: dict[str, str] = {}
    for word in words:
        name, equals, text = (part.strip() for part in word.partition("="))
        name = name.replace("-", "_")
        if not equals or not name or not text:
            raise WrongUsage(f"expected KNOB=VALUE, got {word!r}; {example}")
        if "=" in text:
            raise WrongUsage(f"{word!r}: a space stands between knobs that change together")
        if name in texts:
            raise WrongUsage(f"{name} is given twice: {texts[name]!r} and {text!r}")
        texts[name] = text
    return texts


def variants_of(words: Sequence[str]) -> list[Variant]:
    """Return the changes to try: each value of each knob with each other."""
    texts = knob_texts(words, "for example max_num_batched_tokens=256,512")
    if unknown := [name for name in texts if name not in Knobs.__struct_fields__]:
        raise WrongUsage(
            f"{unknown[0]!r} is no knob; the knobs are {', '.join(Knobs.__struct_fields__)}"
        )
    found = []
    for chosen in itertools.product(*map(_values, texts.values())):
        flags = dict(zip(texts, chosen, strict=True))
        said = " ".join(f"{name}={value}" for name, value in flags.items())
        found.append((said, convert_flags(Knobs, flags)))
    if len(found) > _MAX_VARIANTS:
        raise WrongUsage(f"{len(found)} variants; at most {_MAX_VARIANTS} are tried")
    return found if texts else []


def _values(text: str) -> list[str]:
    """Return values with commas between them, or of FIRST..LAST each doubling, at most eight."""
    first, dots, last = text.partition("..")
    if not dots:
        return text.split(",")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) < int(last)):
        raise WrongUsage(f"expected FIRST..LAST, two whole numbers, got {text!r}")
    low, high = int(first), int(last)
    num_points = max(2, min(_MAX_RANGE, (high // low).bit_length()))
    values = {round(low * (high / low) ** (at / (num_points - 1))) for at in range(num_points)}
    return [str(value) for value in sorted(values)]
