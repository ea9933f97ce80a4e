"""Finds the records in an MCAP file, also in a damaged one.

A record begins with its length, so each record leads to the next. After damage or a cut, the next
chunk is found by the byte pattern of its header. Format: mcap.dev/spec.
"""

import re
import struct
from typing import IO

from mcap.opcode import Opcode

from stepscope.recordings.file.mcap.sink import CHUNK_HEAD, COMPRESSION, RECORD, UNFINISHED

_SEARCH_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 26
_MAX_LENGTH = dict.fromkeys(Opcode, _MAX_RECORD_BYTES) | {
    Opcode.DATA_END: 4,
    Opcode.FOOTER: 20,
}
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

    Args:
        size: size of the file.
    """
    stream.seek(position)
    head = stream.read(CHUNK_HEAD.size)
    if len(head) < RECORD.size:
        return None
    opcode, length = RECORD.unpack_from(head)
    if head[_NAME] == _NAME_BYTES:
        return _chunk_record(head, length)
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


def _chunk_record(head: bytes, length: int) -> tuple[int, int] | None:
    if len(head) < CHUNK_HEAD.size:
        return None
    # If its lengths agree, it is a chunk, whatever its opcode says.
    num_compressed = CHUNK_HEAD.unpack(head)[-1]
    if length == UNFINISHED:
        return Opcode.CHUNK, CHUNK_HEAD.size
    if length == CHUNK_HEAD.size - RECORD.size + num_compressed:
        return Opcode.CHUNK, RECORD.size + length
    return None
