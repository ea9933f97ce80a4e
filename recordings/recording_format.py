"""Our way to use MCAP: what a file is called, says of itself, and names its channels."""

from stepscope.engine import wire

PROFILE = "stepscope"
PART_SUFFIX = ".part"  # of a file that is being written
# Higher ones are refused. 1 had no packed steps and no checkpoints.
FORMAT_VERSION = 2

PACKED_STEP = "packed_step"  # see packed_steps.py
# Channel ids 1, 2, ... in a file that does not name its channels. New topics go to the end.
_AUDIT = wire.TOPICS[wire.Audited].decode()
TOPICS = (
    *(topic for topic in map(bytes.decode, wire.TOPICS.values()) if topic != _AUDIT),
    PACKED_STEP,
    _AUDIT,
)
