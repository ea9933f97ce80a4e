"""Checks the structure of a file: its first bytes, chunks, index and metadata.

`verify` and `rewrite` share this, so that a repair mends whatever `verify` reports.
"""

import msgspec

from stepscope.recordings.file.losses import losses_in
from stepscope.recordings.file.mcap.chunk import has_sound_head
from stepscope.recordings.file.mcap.format import LOSSES
from stepscope.recordings.file.mcap.index import read_index
from stepscope.recordings.file.mcap.sink import MAGIC
from stepscope.recordings.file.reader import Recording


def structure_problems(recording: Recording) -> list[str]:
    """List the structural problems, one line each; empty for an intact file.

    It does not look into chunks, only at the index behind each.
    """
    index = recording.index
    found = []
    if not index.is_being_written and index.why_incomplete is not None:
        found.append(index.why_incomplete)
    recording.stream.seek(0)
    if recording.stream.read(len(MAGIC)) != MAGIC:
        found.append("its first bytes are damaged")
    if not recording.metadata:
        found.append("its metadata cannot be read")
    elif recording.metadata.get("engine_id") != recording.info.engine_id:
        found.append("its metadata and its keyframes name different engines")
    try:
        if LOSSES in index.metadata:
            losses_in(index.metadata[LOSSES])
    except msgspec.DecodeError:
        found.append("its list of repaired losses cannot be read")
    # Without a valid summary, opening the file has walked all chunks.
    walked = read_index(recording.stream, walk=True) if index.is_complete else index
    assert walked is not None
    if walked.num_lost_bytes:
        found.append(f"{walked.num_lost_bytes:,} bytes belong to no record")
    found += [
        f"the index of chunk {number + 1} is damaged"
        for number in range(recording.num_chunks)
        if not _has_sound_index(recording, number)
    ]
    if index.is_complete:
        found += _summary_problems(recording, len(walked.chunks))
    return found


def _has_sound_index(recording: Recording, number: int) -> bool:
    try:
        recording.stored_index(number)
    except ValueError:
        return False
    return True


def _summary_problems(recording: Recording, num_found: int) -> list[str]:
    """Compare the summary with the chunks found by walking the file."""
    places = recording.index.chunks
    found = [
        f"the head of chunk {number} (byte {place.offset:,}) is damaged"
        for number, place in enumerate(places, start=1)
        if not has_sound_head(recording.stream, place)
    ]
    if num_found != len(places):
        found.append(f"{num_found} chunks are found, its index has {len(places)}")
    return found
