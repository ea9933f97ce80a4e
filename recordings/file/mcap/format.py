"""How we use MCAP: names of files, the metadata of a file, and the names of its channels.

`Loss`: steps missing in a repaired file. A repair lists them in the metadata of the new file, so
that `verify` can tell a known loss from an unexplained gap.
"""

import re
import time
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.engine.protocol.wire import EngineInfo

PROFILE = "stepscope"
PART_SUFFIX = ".part"  # added to the name of a file that is being written
# Readers refuse higher versions. Version 1 had no packed steps and no checkpoints.
FORMAT_VERSION = 2

PACKED_STEP = "packed_step"  # see recordings/packing.py
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


LOSSES = "stepscope.losses"  # the metadata record with the losses, and its one entry:
_LOSSES_KEY = "losses"


class Loss(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Steps lost to damage: the steps between `after_step` and `before_step`."""

    after_step: int | None  # None: from the beginning
    before_step: int | None  # None: to the end, however far that was

    def covers(self, other: "Loss") -> bool:
        """Whether this loss includes all steps of another one."""
        begins = self.after_step is None or (
            other.after_step is not None and self.after_step <= other.after_step
        )
        return begins and (
            self.before_step is None
            or (other.before_step is not None and other.before_step <= self.before_step)
        )

    @property
    def text(self) -> str:
        """What is lost: `312 steps (100 to 411)`, or `whatever came after step 4,000`."""
        if self.before_step is None:
            since = self.after_step
            return "whatever came" if since is None else f"whatever came after step {since:,}"
        if self.after_step is None:
            return f"whatever came before step {self.before_step:,}"
        first = self.after_step + 1
        if not (num_steps := self.before_step - first):
            return f"no step, but messages before step {self.before_step:,}"
        return f"{num_steps:,} steps ({first:,} to {self.before_step - 1:,})"


def losses_metadata(losses: Sequence[Loss]) -> dict[str, str]:
    return {_LOSSES_KEY: msgspec.json.encode(losses).decode()}


def losses_in(records: Mapping[str, Mapping[str, str]]) -> list[Loss]:
    """The losses in the metadata records of a file.

    Raises msgspec.DecodeError: they cannot be decoded.
    """
    if not (metadata := records.get(LOSSES)):
        return []
    return msgspec.json.decode(metadata.get(_LOSSES_KEY, ""), type=list[Loss])


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
