"""Reads traces: when requests arrived, and how long their prompts and outputs were.

Reads three public formats, told apart by what is their own:

- Azure LLM inference traces: CSV with the columns `TIMESTAMP,ContextTokens,GeneratedTokens`
  (Splitwise, ISCA 2024).
- Mooncake traces: one JSON object a line with `timestamp` (ms), `input_length`, `output_length`
  and `hash_ids`, which identify the 512-token blocks of the prompt and so show equal prefixes
  (Mooncake, FAST 2025).
- Qwen-Bailian usage traces: like Mooncake's, with `chat_id` and `turn`; `timestamp` is in seconds,
  and blocks have 16 tokens (KVCache in the Wild, ATC 2025).

None has any text. A file is checked to its end before its first row is used.
"""

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from stepscope.engine.protocol.settings.knobs import ConfigError

HASH_BLOCK_TOKENS = 512  # tokens of a block in a Mooncake trace
_BAILIAN_BLOCK_TOKENS = 16
_BAILIAN_FIELDS = frozenset({"chat_id", "parent_chat_id", "turn"})
_MOST_S = 1e9  # seconds of a trace
MAX_TOKENS = 10_000_000  # tokens of one prompt or one output
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")


class TraceRow(NamedTuple):
    """One request of a trace; `hash_ids` is None if the trace does not have them."""

    offset_s: float  # since the first request
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    block_tokens: int = HASH_BLOCK_TOKENS  # tokens of a block with an id


class TraceError(ConfigError):
    """Raised for a file that is no trace, or has a broken line: `FILE:LINE: column ...`."""

    def __init__(self, message: str) -> None:
        super().__init__("bad_trace", message)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Read the first `limit` requests of a trace, by arrival. Raises TraceError for any line."""
    try:
        with path.open("rb") as file:
            rows = _rows(path, file)
            kept = [row for number, row in enumerate(rows) if limit is None or number < limit]
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    if not kept:
        raise TraceError(f"{path} holds no requests")
    first_s = min(row.offset_s for row in kept)
    kept.sort(key=lambda row: row.offset_s)
    return [row._replace(offset_s=row.offset_s - first_s) for row in kept]


def _rows(path: Path, file: BinaryIO) -> Iterator[TraceRow]:
    lines = _text_lines(path, file)
    first = next(lines, None)
    if first is None:
        return iter(())
    read = _mooncake if first[1].lstrip().startswith("{") else _azure
    return read(path, chain([first], lines))


def _text_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(file, start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            _broken(path, number, f"column {error.start + 1}", "text in UTF-8", raw)
        if text.strip():
            yield number, text.rstrip("\r\n")


def _azure(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TraceRow]:
    number, header = next(lines)
    names = [name.strip() for name in _cells(path, number, header)]
    for wanted in _AZURE_COLUMNS:
        if wanted not in names:
            _broken(path, number, f"column {wanted}", "a header with this name", header)
    places = [names.index(name) for name in _AZURE_COLUMNS]
    for number, line in lines:
        cells = _cells(path, number, line)
        if len(cells) != len(names):
            first_odd = min(len(cells), len(names)) + 1
            _broken(path, number, f"column {first_odd}", f"{len(names)} columns", line)
        values: list[float] = []
        for place, parse in zip(places, (_seconds, _whole_number, _whole_number), strict=True):
            value = parse(cells[place].strip())
            if value is None:
                expected = "a time like 2023-11-16 18:15:46.68" if parse is _seconds else _WHOLE
                where = f"column {place + 1} ({names[place]})"
                _broken(path, number, where, expected, cells[place])
            values.append(value)
        yield TraceRow(values[0], int(values[1]), int(values[2]))


def _cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        _broken(path, number, "column 1", f"comma-separated values ({error})", line)


def _mooncake(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[TraceRow]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            _broken(path, number, f"column {error.colno}", f"JSON ({error.msg})", line)
        except ValueError:
            _broken(path, number, "column 1", "numbers of less than 4,300 digits", line)
        except RecursionError:
            _broken(path, number, "column 1", "a flat JSON object", line)
        if not isinstance(record, dict):
            _broken(path, number, "column 1", "a JSON object", line)
        for name in _MOONCAKE_FIELDS:
            if name not in record:
                _broken(path, number, f"column {name}", "a number", "nothing")
        is_bailian = not _BAILIAN_FIELDS.isdisjoint(record)
        unit, per_s = ("seconds", 1) if is_bailian else ("milliseconds", 1000)
        block_tokens = _BAILIAN_BLOCK_TOKENS if is_bailian else HASH_BLOCK_TOKENS
        timestamp = record["timestamp"]
        if not _is_number(timestamp) or not abs(timestamp) <= _MOST_S * per_s:
            _broken(path, number, "column timestamp", unit, timestamp)
        lengths = []
        for name in ("input_length", "output_length"):
            value = record[name]
            if type(value) is not int or not 1 <= value <= MAX_TOKENS:
                _broken(path, number, f"column {name}", _WHOLE, value)
            lengths.append(value)
        hash_ids = record.get("hash_ids")
        if hash_ids is not None and not (
            isinstance(hash_ids, list) and all(type(each) is int for each in hash_ids)
        ):
            _broken(path, number, "column hash_ids", "a list of whole numbers", hash_ids)
        most = -(-lengths[0] // block_tokens)
        if hash_ids and not lengths[0] // block_tokens <= len(hash_ids) <= most:
            ids = f"{most} ids, one for each {block_tokens} of {lengths[0]} tokens"
            _broken(path, number, "column hash_ids", ids, f"{len(hash_ids)} ids")
        yield TraceRow(
            offset_s=timestamp / per_s,
            num_prompt_tokens=lengths[0],
            num_output_tokens=lengths[1],
            hash_ids=None if hash_ids is None else tuple(hash_ids),
            block_tokens=block_tokens,
        )


_SHOWN_CHARS = 60
_WHOLE = f"a whole number of 1 to {MAX_TOKENS}"


def _seconds(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    # A time without a zone counts as UTC: only differences matter, and a local zone would jump with
    # summer time.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _whole_number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TOKENS))):
        return None
    return value if 1 <= (value := int(text)) <= MAX_TOKENS else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _broken(path: Path, line: int, where: str, expected: str, came: object) -> NoReturn:
    try:
        shown = repr(came)
    except ValueError:
        shown = "a number of thousands of digits"
    if len(shown) > _SHOWN_CHARS:
        shown = shown[:_SHOWN_CHARS] + "..."
    raise TraceError(
        f"{path}:{line}: {where}: expected {expected}, got {shown}; "
        "nothing was sent: correct the line or remove it"
    )
