"""Reads one chunk of an MCAP file: the messages that are intact according to its checksums.

A checkpoint is a record in a chunk with the checksum of all bytes before it, see `sink.py`.
"""

import io
import struct
import zlib
from array import array
from collections.abc import Iterator
from typing import IO

import zstandard
from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.records import Attachment

from stepscope.recordings.file.mcap.index import ChunkPlace
from stepscope.recordings.file.mcap.sink import CHECKPOINT, CHUNK_HEAD, RECORD

MAX_CHUNK_BYTES = 256 * 1024 * 1024  # uncompressed; our writer never makes larger ones
_PEEK_BYTES = 16 * 1024  # compressed, at a time
_PIECE_BYTES = 1024  # compressed bytes read at a time: fewer lose less before damage

_MESSAGE = struct.Struct("<HIQQ")  # channel id, sequence, log time, publish time
_MESSAGE_HEAD = struct.Struct("<BQH")  # opcode, length, channel id
_MESSAGE_OPCODE = int(Opcode.MESSAGE)


def read_chunk(stream: IO[bytes], place: ChunkPlace) -> tuple[bytes, bool]:
    """Read the intact records of a chunk: all, or up to its last good checkpoint.

    Returns them, decompressed, and whether others were lost.
    """
    body = read_chunk_bytes(stream, place)
    if len(body) < CHUNK_HEAD.size:
        return b"", True
    _, _, _, _, size, checksum, *_ = CHUNK_HEAD.unpack_from(body)
    compressed = memoryview(body)[CHUNK_HEAD.size :]
    if not place.is_cut and size <= MAX_CHUNK_BYTES:
        try:
            # zstd allocates what the compressed data asks for, damaged or not, so check that first.
            fits = zstandard.frame_content_size(compressed) <= size
            records = zstandard.decompress(compressed, max_output_size=size) if fits else b""
        except zstandard.ZstdError:
            pass
        else:
            if len(records) == size and zlib.crc32(records) == checksum:
                return records, False
    records, _ = _decompressed(compressed)
    intact, _ = _vouched(records)
    return intact, True


def was_overwritten(stream: IO[bytes], place: ChunkPlace) -> bool:
    """Whether an unfinished chunk contains wrong bytes, instead of being merely cut short."""
    compressed = memoryview(read_chunk_bytes(stream, place))[CHUNK_HEAD.size :]
    records, is_sound = _decompressed(compressed)
    return not (is_sound and _vouched(records)[1])


def read_chunk_bytes(stream: IO[bytes], place: ChunkPlace) -> bytes:
    """All bytes of a chunk's record as stored, header included, still compressed."""
    stream.seek(place.offset)
    return stream.read(place.length)


def read_stored_index(stream: IO[bytes], place: ChunkPlace) -> bytes | None:
    """The index that is stored behind a chunk; None if there is none, or not all of it.

    Raises ValueError: it is damaged.
    """
    stream.seek(place.end)
    head = stream.read(RECORD.size)
    if place.is_cut or len(head) < RECORD.size or head[0] != Opcode.ATTACHMENT:
        return None
    _, length = RECORD.unpack(head)
    body = stream.read(min(length, MAX_CHUNK_BYTES))
    if len(body) < length:
        return None  # the file was cut in it
    if int.from_bytes(body[-4:], "little") != zlib.crc32(body[:-4]):
        raise ValueError("a damaged index")
    index: bytes = Attachment.read(ReadDataStream(io.BytesIO(body))).data
    return index


def has_sound_head(stream: IO[bytes], place: ChunkPlace) -> bool:
    """Whether the head of a chunk agrees with the index. No checksum covers the head."""
    stream.seek(place.offset)
    head = stream.read(CHUNK_HEAD.size)
    if len(head) < CHUNK_HEAD.size:
        return False
    opcode, length, start_ns, end_ns, *_, num_compressed = CHUNK_HEAD.unpack(head)
    found = opcode, RECORD.size + length, CHUNK_HEAD.size + num_compressed, start_ns, end_ns
    return found == (Opcode.CHUNK, place.length, place.length, place.start_ns, place.end_ns)


def first_messages(stream: IO[bytes], place: ChunkPlace) -> Iterator[tuple[int, bytes]]:
    """Yield channel id and payload of the first messages of a chunk, as far as the caller reads.

    Checksums are not checked. So use these messages only to search, not as data.
    """
    frame = zstandard.ZstdDecompressor().decompressobj()
    found, num_yielded = b"", 0
    for position in range(place.offset + CHUNK_HEAD.size, place.end, _PEEK_BYTES):
        stream.seek(position)
        try:
            found += frame.decompress(stream.read(min(_PEEK_BYTES, place.end - position)))
        except zstandard.ZstdError:
            return
        begins, _ = message_places(found)
        for begin in begins[num_yielded:]:
            channel_id, _, _, payload = message_at(found, begin)
            yield channel_id, payload
        num_yielded = len(begins)


def _decompressed(compressed: memoryview) -> tuple[bytes, bool]:
    """The bytes up to the first error in decompression, and whether there was no error."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    found = bytearray()
    for begin in range(0, len(compressed), _PIECE_BYTES):
        try:
            found += frame.decompress(compressed[begin : begin + _PIECE_BYTES])
        except zstandard.ZstdError:
            return bytes(found), False
        if frame.eof or len(found) > MAX_CHUNK_BYTES:
            break
    return bytes(found), True


def _vouched(records: bytes) -> tuple[bytes, bool]:
    """The records up to the last good checkpoint, and whether all checkpoints were good."""
    checksum = position = end = 0
    for opcode, begin, length in _records(records):
        if opcode == CHECKPOINT and length == 4:
            checksum = zlib.crc32(records[position:begin], checksum)
            position, body = begin, begin + RECORD.size
            if int.from_bytes(records[body : body + length], "little") != checksum:
                return records[:end], False
            end = begin
    return records[:end], True


def message_places(records: bytes) -> tuple["array[int]", "array[int]"]:
    """Byte offsets at which the messages of a chunk begin, and their channel ids, in order."""
    begins, channel_ids = array("I"), array("H")
    # A chunk has a thousand messages and a seek waits for them, so avoid generators and enums here.
    record = _MESSAGE_HEAD.unpack_from
    position, num_bytes = 0, len(records)
    last = num_bytes - RECORD.size - _MESSAGE.size  # the last place where a message may begin
    while position <= last:
        opcode, length, channel_id = record(records, position)
        begin, position = position, position + RECORD.size + length
        if position > num_bytes:
            break
        if opcode == _MESSAGE_OPCODE and length >= _MESSAGE.size:
            begins.append(begin)
            channel_ids.append(channel_id)
    return begins, channel_ids


def message_at(records: bytes, begin: int) -> tuple[int, int, int, bytes]:
    """Channel id, the lower 32 bits of the sequence number, log time and payload of a message."""
    _, length = RECORD.unpack_from(records, begin)
    body = begin + RECORD.size
    channel_id, sequence, log_ns, _ = _MESSAGE.unpack_from(records, body)
    return channel_id, sequence, log_ns, records[body + _MESSAGE.size : body + length]


def _records(records: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (opcode, offset, length of body) of each whole record."""
    position = 0
    num_bytes = len(records)
    while position + RECORD.size <= num_bytes:
        opcode, length = RECORD.unpack_from(records, position)
        end = position + RECORD.size + length
        if end > num_bytes:
            return
        yield opcode, position, length
        position = end
