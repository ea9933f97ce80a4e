"""Removes prompts and outputs from messages, and from whole recordings.

Everything else stays, such as steps, client ids and marks. Messages of unknown kinds are dropped,
because they may contain tokens.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import (
    Arrived,
    DraftRow,
    EngineInfo,
    EngineStatus,
    RequestEvent,
    Snapshot,
    StepRecord,
    Telemetry,
)
from stepscope.recordings.check.repair import not_ended
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import LOSSES
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import LEVEL_NAMES
from stepscope.recordings.file.writing.recording_file import RecordingFile
from stepscope.recordings.session.indexer import Indexer

Progress = Callable[[float], None]

_MARK = "tokens_taken_out"  # key in the metadata


class Stripped(NamedTuple):
    """Size of a stripped recording, and whether there were prompts or outputs to remove."""

    num_messages: int
    num_bytes: int
    had_tokens: bool


def was_stripped(metadata: Mapping[str, str]) -> bool:
    """Whether a recording's metadata says that prompts and outputs were removed."""
    return metadata.get(_MARK) == "true"


def holds_tokens(message: Telemetry) -> bool:
    """Whether a message contains a prompt or an output, or a part of these."""
    if isinstance(message, StepRecord) and (message.token_ids or message.texts):
        return True
    if isinstance(message, StepRecord | EngineStatus):
        return any(_has_tokens(event) for event in message.events)
    return isinstance(message, Snapshot) and bool(message.transcripts)


def stripped(message: Telemetry) -> Telemetry:
    """The message as an engine without `--with-tokens` would send it."""
    replace = msgspec.structs.replace
    if isinstance(message, StepRecord):
        return replace(
            message,
            token_ids=None,
            texts=None,
            drafts=_drafts(message.drafts),
            events=_events(message.events),
        )
    if isinstance(message, EngineStatus):
        return replace(message, events=_events(message.events))
    if isinstance(message, EngineInfo):
        return replace(message, with_tokens=False)
    if isinstance(message, Snapshot):
        return replace(message, transcripts=None, info=replace(message.info, with_tokens=False))
    return message


def strip(path: Path, output: Path, progress: Progress) -> Stripped:
    """Write a copy of a recording without prompts and outputs. It only reads the original.

    Raises RecordingError: the recording cannot be read or is being written, or `output` exists or
    cannot be written.
    """
    with Recording(path) as recording:
        if recording.index.is_being_written:
            raise not_ended(path)
        if output.exists():
            raise RecordingError(f"{output} is there already; name another with -o")
        try:
            file = RecordingFile(output, is_new=True)
        except FileExistsError as error:
            raise RecordingError(
                f"{output} is being written; if that program was killed, remove its .part file"
            ) from error
        try:
            done = _copy(recording, file, progress)
            file.close()
        except OSError as error:
            file.abandon()
            with contextlib.suppress(OSError):  # for example on a read-only file system
                file.part_path.unlink(missing_ok=True)
            raise RecordingError(f"cannot write {output}: {error.strerror or error}") from error
        except BaseException:
            file.abandon()
            file.part_path.unlink(missing_ok=True)
            raise
    return done._replace(num_bytes=file.num_bytes)


def _copy(recording: Recording, file: RecordingFile, progress: Progress) -> Stripped:
    had_tokens = recording.info.with_tokens
    more = {
        name: value
        for name, value in recording.metadata.items()
        if name in ("series", "started_wall_ns", _MARK, *LEVEL_NAMES)
    }
    if had_tokens:
        more[_MARK] = "true"
    indexer = Indexer()
    info = msgspec.structs.replace(recording.info, with_tokens=False)
    file.begin(info, more, lambda: indexer.cut().encode())
    if LOSSES in recording.index.metadata:
        file.add_metadata(LOSSES, recording.index.metadata[LOSSES])
    num_messages = chunk = 0
    for frame, position in recording.frames():
        try:
            message = wire.decode(frame.payload)
        except msgspec.DecodeError:
            continue  # it may contain tokens
        had_tokens = had_tokens or holds_tokens(message)
        if position.chunk != chunk:
            chunk = position.chunk
            file.end_chunk()
        bare = stripped(message)
        indexer.take(frame.sequence, bare)
        file.add(frame.topic, frame.sequence, wire.encode(bare), frame.log_ns)
        num_messages += 1
        progress(position.chunk / recording.num_chunks)
    return Stripped(num_messages, 0, had_tokens)


def _has_tokens(event: RequestEvent) -> bool:
    return isinstance(event, Arrived) and (
        event.prompt_token_ids is not None or event.prompt_text is not None
    )


def _drafts(drafts: list[DraftRow] | None) -> list[DraftRow] | None:
    if drafts is None:
        return None
    return [msgspec.structs.replace(draft, token_ids=None) for draft in drafts]


def _events(events: list[RequestEvent]) -> list[RequestEvent]:
    return [
        msgspec.structs.replace(event, prompt_token_ids=None, prompt_text=None)
        if isinstance(event, Arrived)
        else event
        for event in events
    ]
