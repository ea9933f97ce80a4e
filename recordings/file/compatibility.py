"""Which recordings this version can read, and what to install for the others."""

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import SCHEMA_VERSION, EngineInfo, Snapshot
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import FORMAT_VERSION


def check_metadata(metadata: dict[str, str], path: object) -> None:
    """Check from the metadata of a file, before any message is decoded, that it can be read.

    Raises RecordingError: a later major version wrote the file.
    """
    for what, highest in (("schema", SCHEMA_VERSION), ("format", FORMAT_VERSION)):
        written = metadata.get(f"{what}_version", "")
        if written.isdecimal() and int(written) > highest:
            by = metadata.get("software_version", "a later version")
            raise RecordingError(
                f"{path} has {what} {written} (written by stepscope {by}), this stepscope reads "
                f"up to {highest}: install {by} or later"
            )


def check_info(info: EngineInfo, path: object) -> None:
    """Check from the engine's version that a file can be read. For files whose metadata is lost.

    Raises RecordingError: the engine is of a later major version.
    """
    if info.schema_version > SCHEMA_VERSION:
        raise RecordingError(
            f"{path} has schema {info.schema_version} (of an engine of version "
            f"{info.software_version}), this stepscope reads up to {SCHEMA_VERSION}: install "
            f"{info.software_version} or later"
        )


def decode_keyframe(payload: bytes, path: object) -> Snapshot:
    """Decode a keyframe (a stored state).

    Raises RecordingError: the payload cannot be decoded, or is another kind of message.
    """
    try:
        message = wire.decode(payload)
    except msgspec.DecodeError as error:
        raise RecordingError(f"{path} holds a keyframe that cannot be decoded: {error}") from error
    if not isinstance(message, Snapshot):
        raise RecordingError(f"{path} holds a keyframe that is a {type(message).__name__}")
    return message
