"""`ForeignFile`: a file of another tool, and the session that a format reads out of it."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.wire import EngineInfo, Telemetry
from stepscope.recordings.errors import RecordingError

FOLDER_PREFIX = "stepscope-import-"  # of temporary recordings

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
Number: TypeAlias = Annotated[float, Meta(ge=0, le=1e10)]  # as seconds since 1970

_HEAD_BYTES = 4 << 20  # a server prints its first figures long after it has begun
COLOURS = re.compile(r"\x1b\[[\d;]*m")
_SPACE = re.compile(r"\s*")
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class ClientRequest:
    """One request of a client's result. Times are nanoseconds of one clock."""

    client_id: str = ""  # the id that the client gave it; empty if the file does not tell
    start_ns: int
    end_ns: int
    num_prompt: int
    num_output: int
    tokens_ns: list[int] = field(default_factory=list)  # when its chunks came; empty: unknown
    has_gaps: bool = True  # whether those are all its chunks, so that times in between are gaps
    error: str | None = None  # why it failed; None: it finished


class ForeignSession(NamedTuple):
    """What a file tells: the engine, its messages in order of time, and a note for its reader."""

    info: EngineInfo
    messages: Iterable[Telemetry]
    note: str | None = None
    requests: Sequence[ClientRequest] = ()  # of a client's result, in the order of the file
    has_starts: bool = True  # whether it tells when requests began


class ForeignFile:
    """A text file that may be of a known format. Its methods may raise RecordingError."""

    def __init__(self, path: Path, head: str | None = None) -> None:
        self.path = path
        if head is not None:  # of a pipe, which is being written now
            self.head, self.changed_ns = head, time.time_ns()
            return
        self.changed_ns = path.stat().st_mtime_ns  # Unix time
        with path.open("rb") as stream:
            begin = stream.read(_HEAD_BYTES)
        # A binary file, as a recording is, is of no format.
        self.head = "" if b"\0" in begin else begin.decode("utf-8-sig", "replace")

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines without colours, numbered from 1."""
        with self.path.open(encoding="utf-8-sig", errors="replace") as stream:
            for number, line in enumerate(stream, 1):
                yield number, COLOURS.sub("", line)

    @cached_property
    def documents(self) -> list[tuple[int, dict[str, Any]]]:
        """The JSON objects, each with its line, or that of its array; none if it is no JSON."""
        if re.match(r"\s*(\[\s*)?\{", self.head) is None:
            return []
        text, line, found = self.path.read_text("utf-8-sig", "replace"), 1, []
        before = place = 0
        decoder, end = json.JSONDecoder(), len(text.rstrip())
        while (place := _SPACE.match(text, place).end()) < end:  # type: ignore[union-attr]
            line, before = line + text.count("\n", before, place), place
            try:
                value, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                place = getattr(error, "pos", place)
                line += text.count("\n", before, place)
                got = text[place : place + 40] if place < end else "the end of the file"
                raise self.error(line, "JSON", got) from error
            values = value if isinstance(value, list) else [value]
            found += [(line, each) for each in values if isinstance(each, dict)]
        return found

    def info(self, engine: str, kind: str, **told: Any) -> EngineInfo:
        """Describes the engine, of which the file tells little: a log or result of `engine`."""
        return EngineInfo(
            engine_id=self.path.name,
            name=self.path.name,
            software_version="",
            engine=engine,
            imported=f"a {kind} of {engine}",
            **{"model": "", **told},
        )

    def error(self, place: int | str, expected: str, got: str) -> RecordingError:
        return RecordingError(f"{self.path}, line {place}: expected {expected}, got {got.strip()}")

    def part(self, line: int | str, values: Mapping[str, Any], name: str) -> dict[str, Any]:
        """An object within another one; empty if there is none."""
        found = values.get(name) or {}
        if not isinstance(found, dict):
            raise self.error(f"{line}, {name}", "an object", ascii(found)[:40])
        return found

    def fields(
        self,
        line: int | str,
        values: Mapping[str, object],
        kind: type[_T],
        names: Mapping[str, str] = {},
    ) -> _T:
        """The values of a line as a Struct; `names`: of its fields, by their names in the file."""
        if names:
            values = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
        try:
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            field, said = in_words(error)
            name = next((theirs for theirs, ours in names.items() if ours == field), field)
            place = f"{line}, {name}" if name else line
            raise RecordingError(f"{self.path}, line {place}: {said}") from error
