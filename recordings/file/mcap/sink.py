"""`McapSink`: writes one MCAP file, chunk by chunk. A crash costs only what was not flushed.

The stock MCAP writer keeps a chunk in memory until it is full: large chunks lose much in a crash,
small ones compress badly. This one writes a chunk while it grows. Compressed bytes are appended at
every flush, or sooner (zstd can end a block without ending the frame). The header with length and
checksum is filled in when the chunk ends.

Each flush also adds a checkpoint: a record with the checksum of everything before it in the chunk,
up to which a cut or damaged chunk can be trusted. Other readers skip its opcode. Behind a chunk, an
attachment may hold the index of its messages (`session/index.py`). Format: mcap.dev/spec.
"""

import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import IO

import zstandard
from mcap import records
from mcap.data_stream import RecordBuilder
from mcap.opcode import Opcode

from stepscope.recordings.file.mcap.format import PROFILE, TOPICS

INDEX_NAME, INDEX_TYPE = "index", "application/zstd"  # of the attachment behind a chunk
MAGIC = b"\x89MCAP0\r\n"
CHECKPOINT = 0x80  # opcode; its body is the CRC-32 of the chunk's records before it
CHECKPOINT_BYTES = 128 * 1024  # most uncompressed bytes between two checkpoints
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 6
UNFINISHED = (1 << 64) - 1  # length of a chunk that has not ended

RECORD = struct.Struct("<BQ")  # opcode, length of what follows
# Opcode, length; times of the first and last message; size and checksum of the records; length of
# the name of the compression, that name; size of the compressed records.
CHUNK_HEAD = struct.Struct("<BQQQQI I4sQ")
_MESSAGE = struct.Struct("<BQHIQQ")
_CHECKPOINT = struct.Struct("<BQI")


class McapSink:
    """Writes one MCAP file. `stream`: seekable, at its start; the caller closes it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._channels = [
            records.Channel(
                id=number, topic=topic, message_encoding="msgpack", metadata={}, schema_id=0
            )
            for number, topic in enumerate(TOPICS, start=1)
        ]
        self._channel_bytes = _encoded(*self._channels)
        self._chunks: list[records.ChunkIndex] = []
        self._num_messages: Counter[int] = Counter()
        self._metadata: list[records.MetadataIndex] = []
        self._attachments: list[records.AttachmentIndex] = []
        self._compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
        # Of the open chunk:
        self.num_chunk_bytes = 0  # uncompressed bytes of the open chunk; 0 without an open chunk
        self._frame: zstandard.ZstdCompressionObj | None = None
        self._begin = 0
        self._num_compressed = 0
        self._checksum = 0
        self._is_flushed = True
        self._next_checkpoint = 0
        self._start_ns = self._end_ns = 0
        library = f"stepscope {version('stepscope')}"
        stream.write(MAGIC + _encoded(records.Header(profile=PROFILE, library=library)))
        self.num_bytes = stream.tell()  # bytes in the file, without those that the next flush adds

    def add_metadata(self, name: str, values: Mapping[str, str]) -> None:
        """Add a metadata record. Call it before the first message or after the last one."""
        self.end_chunk()
        offset = self._stream.tell()
        record = _encoded(records.Metadata(name=name, metadata=dict(values)))
        self._stream.write(record)
        self._metadata.append(records.MetadataIndex(offset=offset, length=len(record), name=name))
        self.num_bytes = self._stream.tell()

    def add(self, channel_id: int, sequence: int, log_ns: int, payload: bytes) -> None:
        """Append a message. `log_ns` must not be earlier than that of the message before."""
        if self._frame is None:
            self._open(log_ns)
        head = _MESSAGE.pack(
            Opcode.MESSAGE, 22 + len(payload), channel_id, sequence & 0xFFFF_FFFF, log_ns, log_ns
        )
        self._put(head + payload)
        self._end_ns = log_ns
        self._num_messages[channel_id] += 1
        self._is_flushed = False
        if self.num_chunk_bytes >= self._next_checkpoint:
            self._put_checkpoint()

    def flush(self) -> None:
        """Write all messages so far to the disk, so that they survive a crash of the machine."""
        self._put_checkpoint()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.num_bytes = self._stream.tell()

    def end_chunk(self, index: bytes | None = None) -> None:
        """End the open chunk, if there is one. The next message begins a new one.

        `index`: the index of its messages, which is written behind it.
        """
        if self._frame is None:
            return
        self._put_checkpoint()
        self._write(self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
        self._frame = None
        end = self._stream.tell()
        self._stream.seek(self._begin)
        self._stream.write(self._head(end - self._begin - RECORD.size))
        self._stream.seek(end)
        self._chunks.append(
            records.ChunkIndex(
                chunk_start_offset=self._begin,
                chunk_length=end - self._begin,
                compression=COMPRESSION,
                compressed_size=self._num_compressed,
                uncompressed_size=self.num_chunk_bytes,
                message_start_time=self._start_ns,
                message_end_time=self._end_ns,
                message_index_offsets={},
                message_index_length=0,
            )
        )
        self.num_chunk_bytes = 0
        if index is not None:
            time_ns = self._end_ns
            record = _encoded(records.Attachment(time_ns, time_ns, INDEX_NAME, INDEX_TYPE, index))
            self._stream.write(record)
            self._attachments.append(
                records.AttachmentIndex(
                    end, len(record), time_ns, time_ns, len(index), INDEX_NAME, INDEX_TYPE
                )
            )
        self.num_bytes = self._stream.tell()

    def finish(self) -> None:
        """Write the summary, which makes the file whole."""
        self.end_chunk()
        self._stream.write(_encoded(records.DataEnd(data_section_crc=0)))
        start = self._stream.tell()
        statistics = records.Statistics(
            attachment_count=len(self._attachments),
            channel_count=len(self._channels),
            channel_message_counts=dict(self._num_messages),
            chunk_count=len(self._chunks),
            message_count=self._num_messages.total(),
            message_start_time=min((c.message_start_time for c in self._chunks), default=0),
            message_end_time=max((c.message_end_time for c in self._chunks), default=0),
            metadata_count=len(self._metadata),
            schema_count=0,
        )
        groups: list[tuple[int, bytes]] = [
            (Opcode.CHANNEL, self._channel_bytes),
            (Opcode.STATISTICS, _encoded(statistics)),
            (Opcode.CHUNK_INDEX, _encoded(*self._chunks)),
            (Opcode.ATTACHMENT_INDEX, _encoded(*self._attachments)),
            (Opcode.METADATA_INDEX, _encoded(*self._metadata)),
        ]
        summary = b"".join(group for _, group in groups)
        offsets_start = start + len(summary)
        position = start
        for opcode, group in groups:
            if group:
                summary += _encoded(records.SummaryOffset(opcode, position, len(group)))
            position += len(group)
        footer_head = struct.pack("<BQQQ", Opcode.FOOTER, 20, start, offsets_start)
        checksum = zlib.crc32(footer_head, zlib.crc32(summary))
        self._stream.write(
            summary + _encoded(records.Footer(start, offsets_start, checksum)) + MAGIC
        )
        self.flush()

    def _open(self, log_ns: int) -> None:
        self._frame = self._compressor.compressobj()
        self._begin = self._stream.tell()
        self._start_ns = self._end_ns = log_ns
        self._num_compressed = self._checksum = self.num_chunk_bytes = 0
        self._next_checkpoint = CHECKPOINT_BYTES
        self._stream.write(self._head(UNFINISHED))
        # Each chunk names the channels, so that each can be read alone.
        self._put(self._channel_bytes)

    def _put_checkpoint(self) -> None:
        if self._frame is None or self._is_flushed:
            return
        self._put(_CHECKPOINT.pack(CHECKPOINT, 4, self._checksum))
        self._write(self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        self._is_flushed = True
        self._next_checkpoint = self.num_chunk_bytes + CHECKPOINT_BYTES

    def _put(self, record: bytes) -> None:
        assert self._frame is not None
        self._checksum = zlib.crc32(record, self._checksum)
        self.num_chunk_bytes += len(record)
        self._write(self._frame.compress(record))

    def _write(self, compressed: bytes) -> None:
        if compressed:
            self._num_compressed += len(compressed)
            self._stream.write(compressed)

    def _head(self, length: int) -> bytes:
        name = COMPRESSION.encode()
        return CHUNK_HEAD.pack(
            *(Opcode.CHUNK, length, self._start_ns, self._end_ns),
            *(self.num_chunk_bytes, self._checksum, len(name), name, self._num_compressed),
        )


def _encoded(*parts: records.McapRecord) -> bytes:
    builder = RecordBuilder()
    for part in parts:
        part.write(builder)
    return bytes(builder.end())  # type: ignore[no-untyped-call]
