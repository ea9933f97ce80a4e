"""Finds the metadata and chunks in an MCAP file, from its summary or by walking its records.

A closed file ends in a summary with a checksum. A file that was not closed (crash, full disk, cut
copy), or whose summary is damaged, is walked: each record begins with its length, and after damage
the next chunk is found by the byte pattern of its header. Format: mcap.dev/spec.
"""

import io
import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Header, Metadata, MetadataIndex, Statistics

from stepscope.recordings.file.mcap.format import PROFILE
from stepscope.recordings.file.mcap.sink import CHUNK_HEAD, COMPRESSION, MAGIC, RECORD, UNFINISHED

_SEARCH_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 26
_MAX_LENGTH = dict.fromkeys(Opcode, _MAX_RECORD_BYTES) | {Opcode.DATA_END: 4, Opcode.FOOTER: 20}
# The name of the compression, with its length, in the head of a chunk; and its place there.
_NAME_BYTES = struct.pack("<I", len(COMPRESSION)) + COMPRESSION.encode()
_NAME = slice(37, 37 + len(_NAME_BYTES))
# Opcode and length (below 2^40, or unfinished), times, size, checksum.
_CHUNK_LOOKS = re.compile(
    rb".(?:.{5}\x00\x00\x00|\xff{8}).{16}.{8}.{4}" + re.escape(_NAME_BYTES), re.DOTALL
)


def record_at(stream: IO[bytes], position: int, size: int) -> tuple[int, int] | None:
    """Opcode and length of the record at `position`; None if no record can be there.

    A chunk may reach beyond the end of the file, if it was not finished or the file was cut.
    """
    stream.seek(position)
    head = stream.read(CHUNK_HEAD.size)
    if len(head) < RECORD.size:
        return None
    opcode, length = RECORD.unpack_from(head)
    if head[_NAME] == _NAME_BYTES and len(head) == CHUNK_HEAD.size:
        # If its lengths agree, it is a chunk, whatever its opcode says.
        if length == UNFINISHED:
            return Opcode.CHUNK, CHUNK_HEAD.size
        is_chunk = length == CHUNK_HEAD.size - RECORD.size + CHUNK_HEAD.unpack(head)[-1]
        return (Opcode.CHUNK, RECORD.size + length) if is_chunk else None
    if opcode == Opcode.CHUNK or length > _MAX_LENGTH.get(opcode, -1):
        return None
    length += RECORD.size
    return (opcode, length) if position + length <= size else None


def find_chunk(stream: IO[bytes], position: int, size: int) -> int:
    """Offset of the next chunk, at `position` or later; the end of the file if there is none."""
    overlap = CHUNK_HEAD.size
    while position < size:
        stream.seek(position)
        block = stream.read(_SEARCH_BYTES + overlap)
        for match in _CHUNK_LOOKS.finditer(block):
            place = position + match.start()
            if record_at(stream, place, size) is not None:
                return place
        position += _SEARCH_BYTES
    return size


BEING_WRITTEN = "it is being written right now"

_FOOTER = struct.Struct("<BQQQI")
_CHUNK_INDEX = struct.Struct("<QQQQI")  # times, place and length of the chunk, size of a map
_MAX_PREAMBLE_BYTES = 1 << 20  # larger records about the file are not read
_UNREADABLE = (McapError, struct.error, ValueError, OSError)


@dataclass(slots=True)
class ChunkPlace:
    """The place of a chunk. If it was never finished, it extends to the end of the file."""

    offset: int
    length: int
    start_ns: int  # wall time from its head, which may be wrong in a walked file
    end_ns: int
    is_cut: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(slots=True)
class McapIndex:
    profile: str | None = None  # None if the file was cut before it
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)  # metadata records, by name
    chunks: list[ChunkPlace] = field(default_factory=list)
    # Text for people; None for a closed file with an intact summary.
    why_incomplete: str | None = None
    # Whether a recorder was writing it when it was opened, so its end is still to come.
    is_being_written: bool = False
    # Whether it was written to its end, even if its summary is now damaged or cut off.
    was_closed: bool = True
    num_lost_bytes: int = 0  # bytes that belong to no record, in a file that was walked
    lost_at: list[int] = field(default_factory=list)  # where each stretch of such bytes begins
    num_messages: int | None = None  # from the summary; None without one

    @property
    def is_complete(self) -> bool:
        return self.why_incomplete is None


def read_index(
    stream: IO[bytes], *, walk: bool = False, is_being_written: bool = False
) -> McapIndex | None:
    """Read the index of a file; None if it begins neither like a recording nor like an MCAP file.

    Args:
        walk: whether to ignore the summary and walk the records.
        is_being_written: whether a recorder holds the file. If it has a summary nevertheless, it is
            treated as closed.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    head = stream.read(128)
    # Our name is in its first bytes twice, so that either the magic or the names may be damaged.
    if not head.startswith(MAGIC) and head.count(PROFILE.encode()) < 2:
        return None
    index = McapIndex(is_being_written=is_being_written)
    _read_preamble(stream, size, index)
    if index.profile != PROFILE and PROFILE.encode() in head:
        index.profile = PROFILE
    if not walk:
        index.why_incomplete = _read_summary(stream, size, index)
    if walk or not index.is_complete:
        index.chunks.clear()
        reaches_end = _walk(stream, size, index)
        if reaches_end and not index.was_closed:
            index.was_closed = True
            index.why_incomplete = "its index is cut off"
    index.is_being_written = is_being_written and not index.is_complete
    if index.is_being_written:
        index.was_closed, index.why_incomplete = False, BEING_WRITTEN
    return index


def read_metadata(path: Path) -> dict[str, str] | None:
    """Read only the metadata of a recording, at its beginning; None for any other file."""
    try:
        with open(path, "rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                return None
            index = McapIndex()
            _read_preamble(stream, stream.seek(0, os.SEEK_END), index)
    except OSError:
        return None
    return index.metadata.get(PROFILE) if index.profile == PROFILE else None


def _read_preamble(stream: IO[bytes], size: int, index: McapIndex) -> None:
    position = len(MAGIC)
    while (record := record_at(stream, position, size)) is not None:
        opcode, length = record
        if opcode in (Opcode.CHUNK, Opcode.DATA_END):
            return
        _read_about(stream, position, record, index)
        position += length


def _read_about(
    stream: IO[bytes], position: int, record: tuple[int, int], index: McapIndex
) -> None:
    """Store a header or metadata record in the index; ignore any other record."""
    opcode, length = record
    if opcode not in (Opcode.HEADER, Opcode.METADATA) or length > _MAX_PREAMBLE_BYTES:
        return
    stream.seek(position + RECORD.size)
    body = ReadDataStream(io.BytesIO(stream.read(length - RECORD.size)))
    try:
        if opcode == Opcode.HEADER:
            index.profile = Header.read(body).profile
        else:
            metadata = Metadata.read(body)
            index.metadata[metadata.name] = metadata.metadata
    except _UNREADABLE:
        pass  # readers that need it report it as missing


def _read_summary(stream: IO[bytes], size: int, index: McapIndex) -> str | None:
    """Fill the index from the summary. Returns None, or a text for why that failed."""
    not_closed = "it was not closed (crash, full disk or cut copy)"
    index.was_closed = False
    footer_bytes = _FOOTER.size + len(MAGIC)
    if size < len(MAGIC) + footer_bytes:
        return not_closed
    stream.seek(size - footer_bytes)
    tail = stream.read(footer_bytes)
    opcode, length, start, _, checksum = _FOOTER.unpack(tail[: _FOOTER.size])
    if opcode != Opcode.FOOTER or length != 20 or not tail.endswith(MAGIC):
        return not_closed
    damaged = "its index is damaged"
    index.was_closed = True
    if not len(MAGIC) <= start <= size - footer_bytes:
        return damaged
    stream.seek(start)
    summary = stream.read(size - footer_bytes - start)
    head = tail[: _FOOTER.size - 4]
    if checksum and zlib.crc32(head, zlib.crc32(summary)) != checksum:
        return damaged
    try:
        _read_groups(stream, summary, size, index)
    except _UNREADABLE:
        return damaged
    return None


def _read_groups(stream: IO[bytes], summary: bytes, size: int, index: McapIndex) -> None:
    """Store the chunks and counts of a summary, and the metadata that it names, in the index."""
    position = 0
    while position < len(summary):
        opcode, length = RECORD.unpack_from(summary, position)
        position += RECORD.size
        if opcode == Opcode.CHUNK_INDEX:
            start_ns, end_ns, offset, chunk_length, _ = _CHUNK_INDEX.unpack_from(summary, position)
            if offset + chunk_length > size:
                raise ValueError("a chunk beyond the end of the file")
            index.chunks.append(ChunkPlace(offset, chunk_length, start_ns, end_ns))
        elif opcode == Opcode.STATISTICS:
            body = ReadDataStream(io.BytesIO(summary[position : position + length]))
            index.num_messages = Statistics.read(body).message_count
        elif opcode == Opcode.METADATA_INDEX:
            body = ReadDataStream(io.BytesIO(summary[position : position + length]))
            offset = MetadataIndex.read(body).offset
            if (record := record_at(stream, offset, size)) is not None:
                _read_about(stream, offset, record, index)
        position += length


def _walk(stream: IO[bytes], size: int, index: McapIndex) -> bool:
    """Find all chunks by going from record to record, even behind damaged bytes.

    Returns whether the file was written to its end: at most its summary is missing.
    """
    position = len(MAGIC)
    while position < size:
        record = record_at(stream, position, size)
        if record is None:
            found = find_chunk(stream, position, size)
            stream.seek(position)
            is_attachment = stream.read(1) == bytes([Opcode.ATTACHMENT])
            if found == size and (index.is_being_written or is_attachment):
                return False  # the rest of it is not written (yet), and no message is in it
            index.num_lost_bytes += found - position
            index.lost_at.append(position)
            position = found
            continue
        opcode, length = record
        if opcode == Opcode.DATA_END:
            after = record_at(stream, position + length, size)
            if after is None or after[0] not in (Opcode.CHUNK, Opcode.MESSAGE_INDEX):
                return True  # only records of a summary follow, as far as it can be read
        if opcode == Opcode.CHUNK:
            index.chunks.append(_chunk_at(stream, position, length, size))
            length = index.chunks[-1].length
        if opcode == Opcode.METADATA:
            _read_about(stream, position, record, index)
        position += length
    return False


def _chunk_at(stream: IO[bytes], position: int, length: int, size: int) -> ChunkPlace:
    stream.seek(position)
    head = CHUNK_HEAD.unpack(stream.read(CHUNK_HEAD.size))
    is_unfinished = head[1] == UNFINISHED
    if is_unfinished or position + length > size:
        # If its head was damaged, other chunks may follow it.
        end = find_chunk(stream, position + CHUNK_HEAD.size, size)
        return ChunkPlace(position, end - position, head[2], head[3], is_cut=True)
    return ChunkPlace(position, length, head[2], head[3])
