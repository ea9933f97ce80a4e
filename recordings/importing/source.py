"""`ForeignFile`: a file of another tool, and the session that a format reads out of it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.engine.protocol.wire import EngineInfo, Telemetry
from stepscope.recordings.errors import RecordingError

FOLDER_PREFIX = "stepscope-import-"  # of temporary recordings

_HEAD_BYTES = 4 << 20  # a server prints its first figures long after it has begun
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_MAX_COUNT = 2**31
MOST = 1e10  # of any number, as seconds since 1970


class ForeignSession(NamedTuple):
    """What a file tells: the engine, then its messages in order of time.

    Attributes:
        note: what a reader must know about the file, in one line.
    """

    info: EngineInfo
    messages: Iterable[Telemetry]
    note: str | None = None


class ForeignFile:
    """A text file that may be of a known format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            self.head = stream.read(_HEAD_BYTES).decode("utf-8", "replace").removeprefix("\ufeff")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def changed_s(self) -> float:
        """When the file was last written, Unix time."""
        return self.path.stat().st_mtime

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines without colours, numbered from 1."""
        with self.path.open(encoding="utf-8-sig", errors="replace") as stream:
            for number, line in enumerate(stream, 1):
                yield number, _COLOURS.sub("", line) if "\x1b" in line else line

    @cached_property
    def documents(self) -> list[tuple[int, dict[str, Any]]]:
        """The JSON objects in the file, each with the line that it begins in.

        Empty if the file does not begin with one.

        Raises:
            RecordingError: it does, and something in it is no JSON.
        """
        if not self.head.lstrip().startswith("{"):
            return []
        text = self.path.read_text("utf-8-sig", "replace")
        decoder, place, found = json.JSONDecoder(), 0, []
        while (place := _after_space(text, place)) < len(text):
            number = text.count("\n", 0, place) + 1
            try:
                value, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                where = number - 1 + getattr(error, "lineno", 1) if place == 0 else number
                raise self.error(where, "", "JSON", "the end or something else") from error
            if not isinstance(value, dict):
                raise self.error(number, "", "a JSON object", type(value).__name__)
            found.append((number, value))
        return found

    def error(self, line: int, field: str, expected: str, got: object) -> RecordingError:
        """The error that a field is not as expected."""
        said = "nothing" if got in (None, "") else got if isinstance(got, str) else repr(got)
        place = f"line {line}" + (f", {field}" if field else "")
        return RecordingError(f"{self.path}, {place}: expected {expected}, got {said[:60]}")


class Fields:
    """The fields of one line, or of one JSON object, by name.

    Args:
        within: what the object is in its document, for errors.

    Methods raise a RecordingError if a value is not as expected.
    """

    def __init__(
        self, file: ForeignFile, line: int, values: Mapping[str, object], within: str = ""
    ) -> None:
        self.file = file
        self.line = line
        self.values = values
        self._within = within

    def error(self, name: str, expected: str, got: object) -> RecordingError:
        return self.file.error(self.line, self._within + name, expected, got)

    def text(self, name: str) -> str:
        """A field as text; empty if it is missing."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def part(self, name: str) -> "Fields":
        """The fields of an object in a field; none if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "an object", value)
        return Fields(self.file, self.line, value or {}, f"{self._within}{name}.")

    def list(self, name: str) -> list[Any] | None:
        """A list in a field; None if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "a list", value)
        return value

    def count(self, *names: str) -> int | None:
        """The first of the fields that is there, which counts something; None if none is."""
        value = self.number(*names, most=_MAX_COUNT)
        return None if value is None else round(value)

    def number(self, *names: str, most: float = MOST) -> float | None:
        """The first of the fields that is there, a number from 0 to `most`; None if none is."""
        name = next((each for each in names if self.values.get(each) is not None), None)
        return None if name is None else self.as_number(name, self.values[name], most)

    def needed(self, *names: str, most: float = MOST) -> float:
        """Like `number`, but one of the fields must be there."""
        value = self.number(*names, most=most)
        if value is None:
            raise self.error(names[0], "a number", None)
        return value

    def as_number(self, name: str, value: object, most: float = MOST) -> float:
        """A value that belongs to a field, as JSON or as text: a number from 0 to `most`."""
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            found = float(value)
            if not 0 <= found <= most:  # NaN is neither
                raise ValueError
        except (ValueError, OverflowError):
            raise self.error(name, f"a number from 0 to {most:g}", value) from None
        return found


_SPACE = re.compile(r"[\s,]*")


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found is not None else place
