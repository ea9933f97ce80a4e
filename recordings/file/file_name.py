"""Names of files that nobody has given one: what they are of, and when they were begun."""

import re
import time

from stepscope.recordings.file.mcap.format import PART_SUFFIX

_SUFFIXES = (PART_SUFFIX, ".mcap")  # of what is replayed
_PREFIX = "stepscope-"
_MAX_LENGTH = 100  # of the source's part: file systems take 255 bytes for all of it


def default_name(source_name: str, suffix: str = ".mcap") -> str:
    """For a file of a source: its name, local time to the second.

    Args:
        source_name: of an engine, which may be an address, or of a recording.
    """
    for end in _SUFFIXES:
        source_name = source_name.removesuffix(end)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", source_name.removeprefix(_PREFIX)).strip("-.")
    name = name[:_MAX_LENGTH] or "engine"
    return f"{_PREFIX}{name}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}"
