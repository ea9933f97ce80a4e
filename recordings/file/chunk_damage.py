"""Texts for what is missing in a recording, as far as it has been read."""

from stepscope.recordings.file.chunk_cache import ChunkCache
from stepscope.recordings.file.mcap.index import McapIndex

REPAIR_HINT = "; 'stepscope verify --repair' makes a whole file of it"


def missing_text(index: McapIndex, chunks: ChunkCache, last_step: int | None) -> str | None:
    """Text for what is missing in a file, why, and what helps; None for a whole file.

    Args:
        last_step: the last readable step; None without one.
    """
    parts = []
    if index.why_incomplete is not None:
        what = index.why_incomplete
        end = "" if last_step is None else f" after step {last_step:,}"
        if index.is_being_written:
            what += f"; what comes{end} is not written yet"
        elif not index.was_closed:
            what += f"; what came{end} is missing"
        if index.num_lost_bytes:
            what += f" ({index.num_lost_bytes:,} bytes unreadable)"
        parts.append(what)
    if chunks.damaged:
        parts.append(damage_text(chunks))
    if not parts:
        return None
    return "; ".join(parts) + ("" if index.is_being_written else REPAIR_HINT)


def damage_text(chunks: ChunkCache) -> str:
    """Text for how many chunks are damaged, and which steps are missing as a result.

    Reads nothing, so it works at any time, even after the file was closed.
    """
    damaged = sorted(chunks.damaged)
    verb = "is" if len(damaged) == 1 else "are"
    said = f"{len(damaged)} of {len(chunks)} chunks {verb} damaged"
    gaps: list[range] = []
    tail = ""
    for number in damaged:
        last, following = _last_step(chunks, number), chunks.ends.get(number + 1)
        if number + 1 == len(chunks):
            end = "" if last is None else f" after step {last:,}"
            tail = f"; what came{end} is missing"
        elif last is None or following is None:
            return f"{said}; 'stepscope verify' says what is missing"
        elif following[0] > last + 1:
            gaps.append(range(last + 1, following[0]))
    if len(gaps) == 1:
        said += f"; steps {gaps[0][0]:,} to {gaps[0][-1]:,} are missing"
    elif gaps:
        first, last = gaps[0][0], gaps[-1][-1]
        said += f"; {sum(map(len, gaps)):,} steps from {first:,} to {last:,} are missing"
    return said + tail


def nothing_left(chunks: ChunkCache) -> str:
    """Text for why a file cannot be shown: no loaded chunk contains a readable keyframe."""
    damaged = [chunks.places[number] for number in sorted(chunks.damaged)]
    first = damaged[0]
    if len(chunks) == 1:
        where = f"its only chunk (byte {first.offset:,}, {first.length:,} bytes) is damaged"
    else:
        verb = "is" if len(damaged) == 1 else "are"
        where = f"{len(damaged)} of its {len(chunks)} chunks {verb} damaged, "
        where += f"{'the first of them ' * (len(damaged) > 1)}at byte {first.offset:,}"
    return f"{where}; no keyframe can be read, so nothing can be shown"


def _last_step(chunks: ChunkCache, number: int) -> int | None:
    """The last readable step of a chunk, or else of the chunk before it; None if unknown."""
    ends = chunks.ends.get(number) or chunks.ends.get(number - 1)
    return None if ends is None else ends[1]
