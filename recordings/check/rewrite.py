"""`rewrite`: a whole file of one that was cut or damaged, or one without prompts and outputs."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Telemetry
from stepscope.recordings.check.strip import STRIPPED, holds_tokens, stripped
from stepscope.recordings.check.verify import Progress, structure_problems
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import (
    LOSSES,
    PART_SUFFIX,
    Loss,
    engine_metadata,
    losses_in,
    losses_metadata,
)
from stepscope.recordings.file.mcap.index import BEING_WRITTEN
from stepscope.recordings.file.reader import Recording, whole_sequence
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.session.indexer import Indexer

_UNFINISHED_SUFFIX = ".rewriting"
_OF_THE_FILE = ("format_version", "software_version")  # metadata that a new file has anew


@dataclass(slots=True)
class RewriteReport:
    num_chunks: int
    num_lost_bytes: int  # outside all chunks
    had_tokens: bool
    num_whole: int = 0
    num_in_part: int = 0
    num_messages: int = 0
    num_steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    losses: list[Loss] = field(default_factory=list)
    num_bytes: int = 0  # size of the new file

    @property
    def num_lost(self) -> int:
        """Chunks without any readable message."""
        return self.num_chunks - self.num_whole - self.num_in_part


def default_output(path: Path, mark: str) -> Path:
    """A new name beside a file: its own without `.part`, else one with `-MARK`."""
    whole = path.with_name(path.name.removesuffix(PART_SUFFIX))
    if whole != path and not whole.exists():
        return whole
    return whole.with_name(f"{whole.stem}-{mark}{whole.suffix}")


def what_is_wrong(path: Path, progress: Progress) -> str | None:
    """Text for why a file needs repair; None for a whole file. Reads all of it.

    Raises RecordingError: the file is no recording, is unreadable, or is being written.
    """
    with Recording(path) as recording:
        if recording.index.is_being_written:
            raise _not_ended(path)
        for number in range(recording.num_chunks):
            recording.check_chunk(number)
            progress((number + 1) / recording.num_chunks)
        if recording.message is None and (problems := structure_problems(recording)):
            return f"{path.name}: {problems[0]}"
        return recording.message


def _not_ended(path: Path) -> RecordingError:
    return RecordingError(f"{path}: {BEING_WRITTEN}; its recorder makes it whole when it ends")


def rewrite(
    path: Path, output: Path, progress: Progress, *, without_tokens: bool = False
) -> RewriteReport:
    """Write what can be read of a recording into a new one, with new indexes. It only reads `path`.

    Of a damaged chunk, everything up to its last good checkpoint is kept. The metadata of the new
    file tell which steps are missing.

    Raises RecordingError: nothing can be read, `path` is being written, or `output` exists or
    cannot be written.
    """
    with Recording(path) as recording:
        if recording.index.is_being_written:
            raise _not_ended(path)
        if output.exists():
            raise RecordingError(f"{output} is there already; name another with -o")
        try:
            file = RecordingFile(output.with_name(output.name + _UNFINISHED_SUFFIX), is_new=True)
        except FileExistsError as error:
            raise RecordingError(
                f"{output} is being written; if that program was killed, remove its "
                f"{_UNFINISHED_SUFFIX}{PART_SUFFIX} file"
            ) from error
        try:
            report = _copy(recording, file, progress, without_tokens)
            file.close()
            if output.exists():
                raise RecordingError(f"{output} was created meanwhile; name another with -o")
            file.path.replace(output)
        except BaseException as error:
            file.abandon()
            with contextlib.suppress(OSError):  # for example on a read-only file system
                file.part_path.unlink(missing_ok=True)
                file.path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                why = error.strerror or error
                raise RecordingError(f"cannot write {output}: {why}") from error
            raise
    report.num_bytes = file.num_bytes
    return report


def _copy(
    recording: Recording, file: RecordingFile, progress: Progress, without_tokens: bool
) -> RewriteReport:
    index, info = recording.index, recording.info
    report = RewriteReport(recording.num_chunks, index.num_lost_bytes, info.with_tokens)
    if without_tokens:
        info = msgspec.structs.replace(info, with_tokens=False)
    # What both tell is taken from keyframes: they have a checksum, the file's metadata have none.
    known = {*_OF_THE_FILE, *engine_metadata(info)}
    metadata = {name: each for name, each in recording.metadata.items() if name not in known}
    if without_tokens and report.had_tokens:
        metadata[STRIPPED] = "true"
    indexer = Indexer()
    file.begin(info, metadata, lambda: indexer.cut().encode())
    sequence = 0
    has_lost = False  # since the last step that was kept
    end: int | None = None  # of the chunk before
    for number, place in enumerate(index.chunks):
        # A chunk with a damaged header appears only as bytes that belong to no chunk. (Before the
        # first chunk these bytes may also be the metadata.)
        if end is not None and any(end <= each < place.offset for each in index.lost_at):
            has_lost = True
        end = place.end
        chunk = recording.chunks.load(number)
        frames = [frame for at in range(len(chunk)) if (frame := chunk.frame(at)) is not None]
        is_whole = recording.check_chunk(number) and len(frames) == len(chunk)
        for frame in frames:
            try:
                message: Telemetry = wire.decode(frame.payload)
            except msgspec.DecodeError:
                continue  # it may contain tokens
            sequence = whole_sequence(frame.sequence, sequence)
            payload = frame.payload
            if without_tokens:
                report.had_tokens = report.had_tokens or holds_tokens(message)
                message = stripped(message)
                payload = wire.encode(message)
            indexer.take(sequence, message)
            file.add(frame.topic, frame.sequence, payload, frame.log_ns)
            report.num_messages += 1
        file.end_chunk()
        report.num_whole += is_whole
        report.num_in_part += not is_whole and bool(frames)
        if chunk.step_places:
            first, last = chunk.end_steps()
            if has_lost:
                report.losses.append(Loss(report.last_step, first))
            if report.first_step is None:
                report.first_step = first
            report.last_step = last
            report.num_steps += len(chunk.step_places)
        has_lost = not is_whole or (has_lost and not chunk.step_places)
        progress(place.end / recording.size)
    if has_lost or not index.was_closed:
        report.losses.append(Loss(report.last_step, None))
    if index.is_complete and index.num_messages == report.num_messages:
        report.losses = []  # all of a damaged chunk could be read
    losses = list(report.losses)
    with contextlib.suppress(msgspec.DecodeError):  # damaged too
        # Those of an earlier repair, where they are not a part of what was lost now.
        losses += [
            each
            for each in losses_in(index.metadata)
            if not any(loss.covers(each) for loss in report.losses)
        ]
    if losses:
        losses.sort(key=lambda loss: -1 if loss.after_step is None else loss.after_step)
        file.add_metadata(LOSSES, losses_metadata(losses))
    return report
