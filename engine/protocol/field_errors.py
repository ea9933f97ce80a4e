"""Rewrites msgspec's error messages about a wrong field, for people who write JSON."""

import re
from typing import NamedTuple

import msgspec

_PATH = re.compile(r" - at `(?:key in |key` in `)?\$\.?(?P<path>[^`]*)`$")
_NAMED_FIELD = re.compile(r"(?P<what>unknown|missing required) field `(?P<name>[^`]*)`")
_TYPES = re.compile(r"`(?P<types>[a-z]+(?: \| [a-z]+)*)`")
# The decoder's names of the JSON types, and ours for people.
_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class FieldError(NamedTuple):
    """What is wrong with a field; `field` is None if the whole message is wrong."""

    field: str | None
    message: str

    @property
    def text(self) -> str:
        return self.message if self.field is None else f"{self.field}: {self.message}"


def in_words(error: msgspec.ValidationError) -> FieldError:
    """Turn an error into the field's path, such as `requests[0].arrival_step`, and a message."""
    message = str(error)
    field: str | None = None
    if match := _PATH.search(message):
        field = match["path"] or None
        message = message[: match.start()]
    if named := _NAMED_FIELD.search(message):
        field = ".".join(part for part in (field, named["name"]) if part)
        message = "this field is required" if named["what"] != "unknown" else "unknown field"
    return FieldError(field, _plain(message))


def _plain(message: str) -> str:
    """Name JSON types in words people know. Drops "or null": all our optional fields accept it."""

    def named(match: re.Match[str]) -> str:
        types = [name for name in match["types"].split(" | ") if name != "null"] or ["null"]
        return " or ".join(_TYPE_NAMES.get(name, name) for name in types)

    message = _TYPES.sub(named, message)
    return message[:1].lower() + message[1:]
