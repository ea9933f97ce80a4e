"""How we use MCAP: names of files, the metadata of a file, and the names of its channels."""

import re
import time

from stepscope.engine.protocol.wire import EngineInfo

PROFILE = "stepscope"
PART_SUFFIX = ".part"  # added to the name of a file that is being written
# Readers refuse higher versions. Version 1 had no packed steps and no checkpoints.
FORMAT_VERSION = 2

# Name of an extra metadata record in a repaired file, for the missing steps (losses.py).
LOSSES = "stepscope.losses"

PACKED_STEP = "packed_step"  # see recordings/packing/steps.py
# Topics of messages, in the order of their channel ids 1, 2, ... Add new ones at the end.
TOPICS = ("info", "knobs", "step", "status", "keyframe", "mark", PACKED_STEP, "audit", "in_flight")


def engine_metadata(info: EngineInfo) -> dict[str, str]:
    return {
        "schema_version": str(info.schema_version),
        "engine_id": info.engine_id,
        "engine_name": info.name,
        "model": info.model,
        "with_tokens": str(info.with_tokens).lower(),
    }


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
