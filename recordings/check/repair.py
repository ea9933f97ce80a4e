"""Makes a whole file from one that was cut short or damaged. It only reads the old file."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from stepscope.recordings.check.structure import structure_problems
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file import access, losses
from stepscope.recordings.file.chunk_cache import KEYFRAME, LoadedChunk, step_of
from stepscope.recordings.file.losses import Loss
from stepscope.recordings.file.mcap.chunk import (
    channels,
    read_chunk,
    read_chunk_bytes,
    read_stored_index,
)
from stepscope.recordings.file.mcap.format import (
    LOSSES,
    PART_SUFFIX,
    PROFILE,
    TOPICS,
    engine_metadata,
)
from stepscope.recordings.file.mcap.index import BEING_WRITTEN, ChunkPlace, McapIndex, read_index
from stepscope.recordings.file.mcap.sink import McapSink
from stepscope.recordings.file.reader import Recording, decode_keyframe

UNFINISHED_SUFFIX = ".repairing"

Progress = Callable[[float], None]


@dataclass(slots=True)
class RepairReport:
    """What was kept, and what was lost."""

    num_chunks: int = 0
    num_whole: int = 0
    num_in_part: int = 0
    num_messages: int = 0
    num_steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    losses: list[Loss] = field(default_factory=list)
    num_lost_bytes: int = 0  # outside all chunks
    num_bytes: int = 0  # size of the new file

    @property
    def num_lost(self) -> int:
        """Chunks without any readable message."""
        return self.num_chunks - self.num_whole - self.num_in_part


def default_output(path: Path) -> Path:
    """The path to write the repaired file to by default: a new name beside the damaged file."""
    whole = path.with_name(path.name.removesuffix(PART_SUFFIX))
    if whole != path and not whole.exists():
        return whole
    for number in range(1, 1000):
        mark = "-repaired" if number == 1 else f"-repaired-{number}"
        output = whole.with_name(f"{whole.stem}{mark}{whole.suffix}")
        if not output.exists():
            return output
    raise RecordingError(f"{path.parent} is full of repaired files; name another with -o")


def what_is_wrong(path: Path, progress: Progress) -> str | None:
    """Text for why a file needs repair; None for a whole file. Reads all of it.

    Raises RecordingError: the file is no recording, is unreadable, or is being written.
    """
    with Recording(path) as recording:
        if recording.index.is_being_written:
            raise not_ended(path)
        for number in range(recording.num_chunks):
            recording.check_chunk(number)
            progress((number + 1) / recording.num_chunks)
        if recording.message is None and (problems := structure_problems(recording)):
            return f"{path.name}: {problems[0]}"
        return recording.message


def not_ended(path: Path) -> RecordingError:
    """The error for a file that is being written: a copy would lack what is written next."""
    return RecordingError(f"{path}: {BEING_WRITTEN}; its recorder makes it whole when it ends")


def repair(path: Path, output: Path, progress: Progress) -> RepairReport:
    """Write what can be read of `path` into `output`, with a new index.

    Whole chunks are copied unchanged. Of a damaged chunk, everything up to its last good checkpoint
    is kept. The metadata of the new file tell which steps are missing.

    Raises RecordingError: nothing in the file can be read, `output` exists or cannot be written, or
    `path` is being written.
    """
    if output.exists():
        raise RecordingError(f"{output} is there already; name another with -o")
    unfinished = output.with_name(output.name + UNFINISHED_SUFFIX)
    with open(path, "rb") as source:
        if access.is_held(source):
            raise not_ended(path)
        index = read_index(source)
        if index is None:
            raise RecordingError(f"{path} is not a stepscope recording")
        if not index.chunks:
            raise RecordingError(f"{path} holds no chunk that can be read: nothing to repair")
        try:
            with open(unfinished, "xb", opener=access.private) as target:
                report = _copy(source, index, target, unfinished, progress)
            if not report.num_messages:
                raise RecordingError(f"{path} holds nothing that can be read: nothing to repair")
            if output.exists():
                raise RecordingError(f"{output} was created meanwhile; name another with -o")
            unfinished.replace(output)
        except FileExistsError as error:
            raise RecordingError(
                f"{unfinished} exists: another repair is running; if it was killed, remove the file"
            ) from error
        except OSError as error:
            with contextlib.suppress(OSError):  # for example on a read-only file system
                unfinished.unlink(missing_ok=True)
            raise RecordingError(f"cannot write {output}: {error.strerror or error}") from error
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    return report


def _copy(
    source: IO[bytes], index: McapIndex, target: IO[bytes], target_path: Path, progress: Progress
) -> RepairReport:
    report = RepairReport(num_chunks=len(index.chunks), num_lost_bytes=index.num_lost_bytes)
    size = os.fstat(source.fileno()).st_size
    sink: McapSink | None = None
    has_lost = False
    end: int | None = None  # end of the chunk before
    for place in index.chunks:
        # A chunk with a damaged header appears only as bytes that belong to no chunk.
        # (Before the first chunk these bytes may also be the metadata.)
        if end is not None and any(end <= each < place.offset for each in index.lost_at):
            has_lost = True
        end = place.end
        records, is_damaged = read_chunk(source, place)
        chunk = LoadedChunk(records)
        if sink is None and chunk.frames:
            sink = McapSink(target, PROFILE, index.library or PROFILE, _topics(records))
            # Keyframes have a checksum and the metadata of a file have none, so keyframes win.
            metadata = index.metadata.get(PROFILE, {}) | _metadata(chunk)
            if metadata.get("with_tokens") == "false":  # if unknown, only the owner may read it
                access.share(target, target_path)
            sink.add_metadata(PROFILE, metadata)
        if not is_damaged:
            report.num_whole += 1
        elif chunk.frames:
            report.num_in_part += 1
        if sink is not None and chunk.frames:
            _put(source, place, chunk, sink, whole=not is_damaged)
            _count(chunk, report, has_lost)
            has_lost = is_damaged or (has_lost and not chunk.step_places)
        else:
            has_lost = has_lost or is_damaged
        progress(place.end / size)
    if has_lost or not index.was_closed:
        report.losses.append(Loss(report.last_step, None))
    if index.is_complete and index.num_messages == report.num_messages:
        report.losses = []  # all of a damaged chunk could be read
    if len(report.losses) == 1 and index.is_complete and index.num_steps is not None:
        num_missing = index.num_steps - report.num_steps
        report.losses = [report.losses[0]._replace(num_steps=num_missing)]
    if sink is not None:
        _write_losses(index, report, sink)
        sink.finish()
        report.num_bytes = sink.num_bytes
    return report


def _write_losses(index: McapIndex, report: RepairReport, sink: McapSink) -> None:
    try:
        earlier = losses.losses_in(index.metadata.get(LOSSES, losses.as_metadata([])))
    except msgspec.DecodeError:
        earlier = []  # damaged too
    if all_losses := losses.merged(earlier, report.losses):
        sink.add_metadata(LOSSES, losses.as_metadata(all_losses))


def _put(
    source: IO[bytes], place: ChunkPlace, chunk: LoadedChunk, sink: McapSink, *, whole: bool
) -> None:
    if whole:
        counts: dict[int, int] = {}
        for message in chunk.messages:
            counts[message.channel_id] = counts.get(message.channel_id, 0) + 1
        times = chunk.messages[0].log_ns, chunk.messages[-1].log_ns
        index = None
        with contextlib.suppress(ValueError):  # damaged: readers make it anew
            index = read_stored_index(source, place)
        sink.copy_chunk(read_chunk_bytes(source, place), times, counts, index)
        return
    for message in chunk.messages:
        sink.add(*message[:3], message.payload)
    sink.end_chunk()


def _count(chunk: LoadedChunk, report: RepairReport, has_lost: bool) -> None:
    report.num_messages += len(chunk.messages)
    report.num_steps += len(chunk.step_places)
    if not chunk.step_places:
        return
    first = step_of(chunk.frames[chunk.step_places[0]].payload)
    if has_lost:
        report.losses.append(Loss(report.last_step, first))
    if report.first_step is None:
        report.first_step = first
    report.last_step = step_of(chunk.frames[chunk.step_places[-1]].payload)


def _topics(records: bytes) -> tuple[str, ...]:
    found = channels(records)
    if found and sorted(found) == list(range(1, len(found) + 1)):
        return tuple(found[number] for number in sorted(found))
    return TOPICS


def _metadata(chunk: LoadedChunk) -> dict[str, str]:
    for frame in chunk.frames:
        if frame.topic == KEYFRAME:
            return engine_metadata(decode_keyframe(frame.payload, "the file").info)
    return {}
