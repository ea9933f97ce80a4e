"""How we use MCAP: the file suffix, the metadata of a file, and the names of its channels."""

from stepscope.engine.protocol.wire import EngineInfo

PROFILE = "stepscope"
PART_SUFFIX = ".part"  # of a file that is being written
# Higher ones are refused. 1 had no packed steps and no checkpoints.
FORMAT_VERSION = 2

# Metadata of a repaired file, beside that of its engine: the steps that are missing (losses.py).
LOSSES = "stepscope.losses"

PACKED_STEP = "packed_step"  # see packed_steps.py
# Of messages, in the order of their channel ids 1, 2, ..., which are fixed by the files that do not
# name their channels: new ones go to the end.
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
