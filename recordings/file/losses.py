"""`Loss`: steps missing in a repaired file, and how its metadata lists them.

A repair writes its losses into the metadata of the new file. So `verify` can distinguish a known
loss from an unexplained gap.
"""

from collections.abc import Mapping, Sequence

import msgspec

_KEY = "losses"


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


def as_metadata(losses: Sequence[Loss]) -> dict[str, str]:
    return {_KEY: msgspec.json.encode(losses).decode()}


def losses_in(metadata: Mapping[str, str]) -> list[Loss]:
    """The losses recorded in a file's metadata.

    Raises msgspec.DecodeError: they cannot be decoded.
    """
    if not metadata:
        return []
    return msgspec.json.decode(metadata.get(_KEY, ""), type=list[Loss])


def merged(earlier: Sequence[Loss], later: Sequence[Loss]) -> list[Loss]:
    """Merge the losses of a file that was repaired before with those of the new repair."""
    found = [*later, *(each for each in earlier if not any(loss.covers(each) for loss in later))]
    return sorted(found, key=lambda loss: -1 if loss.after_step is None else loss.after_step)
