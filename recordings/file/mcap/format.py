"""How we use MCAP: the file suffix, the metadata of a file, and the names of its channels."""

from stepscope.engine.protocol.wire import EngineInfo

PROFILE = "stepscope"
PART_SUFFIX = ".part"  # added to the name of a file that is being written
# Readers refuse higher versions. Version 1 had no packed steps and no checkpoints.
FORMAT_VERSION = 2

# Name of an extra metadata record in a repaired file, for the missing steps (losses.py).
LOSSES = "stepscope.losses"

PACKED_STEP = "packed_step"  # see recordings/packing/steps.py
# Topics of messages, in the order of their channel ids 1, 2, ... Files that do not name their
# channels fix these ids, so add new topics at the end.
TOPICS = ("info", "knobs", "step", "status", "keyframe", "mark", PACKED_STEP, "audit", "in_flight")


def engine_metadata(info: EngineInfo) -> dict[str, str]:
    """The metadata that describe the engine of a file."""
    return {
        "schema_version": str(info.schema_version),
        "engine_id": info.engine_id,
        "engine_name": info.name,
        "model": info.model,
        "with_tokens": str(info.with_tokens).lower(),
    }
