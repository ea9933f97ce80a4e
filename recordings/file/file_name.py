"""Default names of files, made of the source's name and the time of creation."""

import re
import time

from stepscope.recordings.file.mcap.format import PART_SUFFIX

_SUFFIXES = (PART_SUFFIX, ".mcap")  # of a replayed recording
_PREFIX = "stepscope-"
_MAX_LENGTH = 100  # bytes for the source: file systems allow 255 for the whole name


def default_name(source_name: str, suffix: str = ".mcap") -> str:
    """A file name from the source's name and the local time to the second."""
    for end in _SUFFIXES:
        source_name = source_name.removesuffix(end)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", source_name.removeprefix(_PREFIX)).strip("-.")
    name = name[:_MAX_LENGTH] or "engine"
    return f"{_PREFIX}{name}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}"
