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
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TextIO, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct

from stepscope.engine.protocol.field_errors import in_words
from stepscope.engine.protocol.knobs import ConfigError

HASH_BLOCK_TOKENS = 512  # tokens of a block in a Mooncake trace
_BAILIAN_BLOCK_TOKENS = 16
MAX_TOKENS = 10_000_000  # tokens of one prompt or one output
_MOST_MS = 1e12

_NumTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class TraceRow(NamedTuple):
    """One request of a trace; `hash_ids` is None if the trace does not have them."""

    offset_s: float  # since the first request
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    block_tokens: int = HASH_BLOCK_TOKENS  # tokens of a block with an id


class _AzureRow(Struct, frozen=True):
    time: datetime = msgspec.field(name="TIMESTAMP")
    num_prompt_tokens: _NumTokens = msgspec.field(name="ContextTokens")
    num_output_tokens: _NumTokens = msgspec.field(name="GeneratedTokens")


class _MooncakeRow(Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=-_MOST_MS, le=_MOST_MS)]
    input_length: _NumTokens
    output_length: _NumTokens
    hash_ids: tuple[int, ...] | None = None
    chat_id: Any = UNSET  # these three are Bailian's
    parent_chat_id: Any = UNSET
    turn: Any = UNSET


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Read the first `limit` requests of a trace, by arrival.

    Raises ConfigError: it is no trace, or has a broken line anywhere: `FILE:LINE: column ...`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_json = file.readline().lstrip().startswith("{")
            file.seek(0)
            rows = (_mooncake if is_json else _azure)(path, file)
            kept = [row for number, row in enumerate(rows) if limit is None or number < limit]
    except OSError as error:
        raise ConfigError("bad_trace", f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("bad_trace", f"{path} is no text in UTF-8 ({error.reason})") from error
    if not kept:
        raise ConfigError("bad_trace", f"{path} holds no requests")
    first_s = min(row.offset_s for row in kept)
    kept.sort(key=lambda row: row.offset_s)
    return [row._replace(offset_s=row.offset_s - first_s) for row in kept]


def _azure(path: Path, file: TextIO) -> Iterator[TraceRow]:
    reader = csv.DictReader(file, strict=True)
    try:
        for found in reader:
            row = msgspec.convert(
                {name.strip(): text for name, text in found.items() if name},
                _AzureRow,
                strict=False,
            )
            # A time without a zone counts as UTC: only differences matter, and a local zone would
            # jump with summer time.
            moment = row.time if row.time.tzinfo else row.time.replace(tzinfo=UTC)
            yield TraceRow(moment.timestamp(), row.num_prompt_tokens, row.num_output_tokens)
    except (msgspec.ValidationError, csv.Error) as error:
        _broken(path, reader.reader.line_num, error)


def _mooncake(path: Path, file: TextIO) -> Iterator[TraceRow]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_MooncakeRow)
        except (msgspec.DecodeError, RecursionError) as error:
            _broken(path, number, error)
        is_bailian = any(each is not UNSET for each in (row.chat_id, row.parent_chat_id, row.turn))
        block_tokens = _BAILIAN_BLOCK_TOKENS if is_bailian else HASH_BLOCK_TOKENS
        most = -(-row.input_length // block_tokens)
        if row.hash_ids and not row.input_length // block_tokens <= len(row.hash_ids) <= most:
            expected = f"{most} ids, one for each {block_tokens} of {row.input_length} tokens"
            _broken(path, number, f"column hash_ids: expected {expected}, got {len(row.hash_ids)}")
        offset_s = row.timestamp if is_bailian else row.timestamp / 1000
        yield TraceRow(offset_s, row.input_length, row.output_length, row.hash_ids, block_tokens)


def _broken(path: Path, line: int, what: object) -> NoReturn:
    if isinstance(what, msgspec.ValidationError):
        error = in_words(what)
        what = error.text if error.field is None else f"column {error.text}"
    raise ConfigError(
        "bad_trace", f"{path}:{line}: {what}; nothing was sent: correct the line or remove it"
    )
