"""Names of keys: in the config file, in Textual, and on the screen.

A key is a character (`p`, `P`, `[`) or a name (`space`, `left`, `f5`), optionally after `ctrl+`,
`alt+` or `shift+` (`^l` is `ctrl+l`). A key that a terminal cannot tell from another is refused.
"""

import unicodedata
from functools import cache

NAMED = (
    "space", "enter", "tab", "escape", "backspace", "delete", "insert", "home", "end", "pageup",
    "pagedown", "up", "down", "left", "right", *(f"f{number}" for number in range(1, 25)),
)  # fmt: skip
_ALIASES = {
    "esc": "escape", "return": "enter", "del": "delete", "ins": "insert", "pgup": "pageup",
    "pgdn": "pagedown",
}  # fmt: skip
# Characters for which Textual does not use the Unicode name.
_RENAMED = {
    "solidus": "slash",
    "reverse_solidus": "backslash",
    "commercial_at": "at",
    "hyphen_minus": "minus",
    "plus_sign": "plus",
    "low_line": "underscore",
}
_MODIFIERS = ("alt", "ctrl", "shift")  # in the order in which Textual writes them
_SAME_IN_A_TERMINAL = {
    "ctrl+i": "tab",
    "ctrl+m": "enter",
    "ctrl+h": "backspace",
    "ctrl+left_square_bracket": "escape",
}
_ARROWS = {"left": "←", "right": "→", "up": "↑", "down": "↓"}
_SHOWN = {"pageup": "PgUp", "pagedown": "PgDn", "escape": "Esc"}
_SHOWN |= {name: name for name in ("space", "tab", "backspace", "delete", "insert")}


class KeyNameError(ValueError):
    """The text does not name a key; the message says how to write one."""


def parse(text: str) -> str:
    """Convert a key of the config file to Textual's name (`[` to `left_square_bracket`)."""
    rest = text.strip() if len(text) > 1 else text
    if len(rest) == 2 and rest[0] == "^":
        rest = f"ctrl+{rest[1]}"
    *before, name = [*rest[:-1].split("+"), "+"] if rest.endswith("+") else rest.split("+")
    modifiers = {part.strip().lower() for part in before if part}
    if not modifiers <= set(_MODIFIERS):
        unknown = ", ".join(sorted(modifiers - set(_MODIFIERS)))
        raise KeyNameError(f"{unknown!r} is not a modifier; there are: {', '.join(_MODIFIERS)}")
    key = _plain(name if len(name) == 1 else name.strip(), text)
    if key not in NAMED and "shift" in modifiers and "ctrl" not in modifiers:
        if not key.isalpha() or len(key) > 1:
            raise KeyNameError(f"{text!r}: write the character that the keys make")
        key = key.upper()
        modifiers -= {"shift"}
    elif len(key) == 1 and "ctrl" in modifiers:
        key = key.lower()
    full = "+".join([each for each in _MODIFIERS if each in modifiers] + [key])
    if full == "ctrl+c":
        raise KeyNameError("ctrl+c always leaves the dashboard, it cannot do anything else")
    if full in _SAME_IN_A_TERMINAL:
        raise KeyNameError(f"a terminal sends {text!r} as {_SAME_IN_A_TERMINAL[full]}")
    return full


def _plain(name: str, text: str) -> str:
    """Return Textual's name of a key without modifiers; errors show `text`, all of it."""
    lower = _ALIASES.get(name.lower(), name.lower())
    if lower in NAMED or name == " ":
        return lower.replace(" ", "space")
    character = _character(name) or _character(lower)
    if character is not None and _character(key := _of_character(character)) == character:
        return key
    raise KeyNameError(
        f"{text!r} is not a key; a key is a character (p, P, [), or one of "
        f"{', '.join(NAMED[:15])}, "
        "f1 to f24, and may have ctrl+, alt+ or shift+ before it"
    )


def _of_character(character: str) -> str:
    if character.isalnum():
        return character
    name = unicodedata.name(character, "").lower().replace("-", "_").replace(" ", "_")
    return _RENAMED.get(name, name)


@cache
def _symbols() -> dict[str, str]:
    """Return Textual's name -> character, for what keyboards have besides letters and digits."""
    codes = (*range(0x21, 0x100), *range(0x2010, 0x2213))
    return {_of_character(chr(code)): chr(code) for code in codes if chr(code).isprintable()}


def _character(name: str) -> str | None:
    """Return the printable character with this name in Textual; None if there is none."""
    if len(name) == 1:
        return name if name.isprintable() else None
    return _symbols().get(name)


def written(key: str) -> str:
    """Return a key (Textual's name) as the config file has it; the inverse of `parse`."""
    *modifiers, name = key.split("+")
    return "+".join([*modifiers, name if name in NAMED else _character(name) or name])


def shown(key: str, ascii_only: bool = False) -> str:
    """Convert Textual's name of a key to the short form on the screen: `⇧←`, `^l`, `PgUp`, `[`."""
    *modifiers, name = key.split("+")
    signs = {"ctrl": "^", "shift": "Shift+" if ascii_only else "⇧", "alt": "alt+"}
    mark = "".join(signs[each] for each in modifiers)
    if name in _ARROWS:
        return mark + (name.capitalize() if ascii_only else _ARROWS[name])
    if name in NAMED:
        return mark + _SHOWN.get(name, name.capitalize())
    return mark + (_character(name) or name)


def spelled(text: str) -> str:
    """Replace the glyphs of arrow keys by words: `<` would be read as the key `<`."""
    for glyphs, words in (("⇧", "Shift+"), ("←/→", "Left/Right"), ("↑/↓", "Up/Down")):
        text = text.replace(glyphs, words)
    return text
