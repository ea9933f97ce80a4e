"""What is where in an MCAP file: preamble and chunks, from its summary or by walking its records.

A file that was closed ends in a summary. One that was not (crash, full disk, cut copy) is walked
from chunk to chunk; every chunk that is there whole can be read. Format: mcap.dev/spec.
"""

import io
import os
import struct
from dataclasses import dataclass, field
from typing import IO

import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.reader import make_reader
from mcap.records import Chunk, Header, Metadata
from mcap.stream_reader import CRCValidationError, get_chunk_data_stream

from stepscope.engine import wire

MAGIC = b"\x89MCAP0\r\n"
PROFILE = "stepscope"
PART_SUFFIX = ".part"  # of a file that is being written
TOPICS = tuple(topic.decode() for topic in wire.TOPICS.values())  # channel ids 1, 2, ... in a file

_RECORD = struct.Struct("<BQ")  # opcode, length of what follows
_CHUNK = struct.Struct("<QQ")  # times of the first and last message
_MESSAGE = struct.Struct("<HIQQ")  # channel id, sequence, log time, publish time
_UNREADABLE = (
    McapError,
    CRCValidationError,
    zstandard.ZstdError,
    struct.error,
    ValueError,
    OSError,
)


class RecordingError(Exception):
    """A file that cannot be read or written; the message is one line for a person."""


@dataclass(slots=True)
class ChunkPlace:
    """Where a chunk lies, and the ids of the channels in it (None: not known)."""

    offset: int
    length: int
    start_ns: int  # wall time
    end_ns: int
    channel_ids: frozenset[int] | None = None

    def may_hold(self, channel_id: int) -> bool:
        return self.channel_ids is None or channel_id in self.channel_ids


@dataclass(slots=True)
class McapIndex:
    """What was found in a file."""

    profile: str | None = None  # None: cut before it
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)  # before the first chunk
    chunks: list[ChunkPlace] = field(default_factory=list)
    is_complete: bool = True
    num_lost_bytes: int = 0  # at the end of a file that was cut


def read_index(stream: IO[bytes]) -> McapIndex | None:
    """Index of a file, None when it does not begin like an MCAP file."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if stream.read(len(MAGIC)) != MAGIC:
        return None
    index = McapIndex()
    _walk(stream, size, index, only_preamble=True)
    if not _read_summary(stream, size, index):
        index.chunks.clear()
        index.is_complete = False
        _walk(stream, size, index, only_preamble=False)
    return index


def read_chunk(stream: IO[bytes], place: ChunkPlace) -> bytes | None:
    """Decompressed records of a chunk; None when it is damaged (its checksum tells)."""
    try:
        stream.seek(place.offset + _RECORD.size)
        body = stream.read(place.length - _RECORD.size)
        chunk = Chunk.read(ReadDataStream(io.BytesIO(body)))
        records, size = get_chunk_data_stream(chunk, validate_crc=True)
        return records.read(size)
    except _UNREADABLE:
        return None


def messages(records: bytes) -> list[tuple[int, int, int, bytes]]:
    """(channel id, sequence, log time, payload) of each message in a chunk."""
    found = []
    position = 0
    while position + _RECORD.size <= len(records):
        opcode, length = _RECORD.unpack_from(records, position)
        position += _RECORD.size
        if opcode == Opcode.MESSAGE:
            channel_id, sequence, log_ns, _ = _MESSAGE.unpack_from(records, position)
            payload = records[position + _MESSAGE.size : position + length]
            found.append((channel_id, sequence, log_ns, payload))
        position += length
    return found


def _read_summary(stream: IO[bytes], size: int, index: McapIndex) -> bool:
    stream.seek(max(0, size - len(MAGIC)))
    if size < 2 * len(MAGIC) or stream.read() != MAGIC:
        return False
    try:
        stream.seek(0)
        summary = make_reader(stream).get_summary()
    except _UNREADABLE:
        return False
    if summary is None:
        return False
    for chunk in summary.chunk_indexes:
        if chunk.chunk_start_offset + chunk.chunk_length > size:
            return False
        index.chunks.append(
            ChunkPlace(
                chunk.chunk_start_offset,
                chunk.chunk_length,
                chunk.message_start_time,
                chunk.message_end_time,
                frozenset(chunk.message_index_offsets) or None,
            )
        )
    return True


def _walk(stream: IO[bytes], size: int, index: McapIndex, *, only_preamble: bool) -> None:
    """From record to record, as far as they are whole."""
    position = len(MAGIC)
    while True:
        stream.seek(position)
        head = stream.read(_RECORD.size)
        if len(head) < _RECORD.size:
            break
        opcode, length = _RECORD.unpack(head)
        end = position + _RECORD.size + length
        if opcode == 0 or end > size:
            break
        if opcode in (Opcode.DATA_END, Opcode.FOOTER) or (only_preamble and opcode == Opcode.CHUNK):
            return
        if opcode == Opcode.CHUNK:
            start_ns, end_ns = _CHUNK.unpack(stream.read(_CHUNK.size))
            index.chunks.append(ChunkPlace(position, end - position, start_ns, end_ns, frozenset()))
        elif opcode == Opcode.MESSAGE_INDEX and index.chunks:
            last = index.chunks[-1]
            last.channel_ids = (last.channel_ids or frozenset()) | {
                int.from_bytes(stream.read(2), "little")
            }
        elif opcode in (Opcode.HEADER, Opcode.METADATA):
            _read_preamble(opcode, stream.read(length), index)
        position = end
    index.num_lost_bytes = size - position
    if index.chunks:
        index.chunks[-1].channel_ids = None  # the list of its channels may be cut


def _read_preamble(opcode: int, body: bytes, index: McapIndex) -> None:
    try:
        if opcode == Opcode.HEADER:
            index.profile = Header.read(ReadDataStream(io.BytesIO(body))).profile
        else:
            metadata = Metadata.read(ReadDataStream(io.BytesIO(body)))
            index.metadata[metadata.name] = metadata.metadata
    except _UNREADABLE:
        return  # whoever needs it finds it missing and says so
