"""`Loss`: steps that a repaired file does not have, and how it says so.

`repair` writes its losses into the metadata of the new file. So `verify` can tell a hole that is
accounted for from one that nobody knows of.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

_KEY = "losses"


class Loss(NamedTuple):
    """Steps that were in damaged places: those after `after_step` and before `before_step`."""

    after_step: int | None  # None: from the beginning
    before_step: int | None  # None: to the end, however far that was
    num_steps: int | None = None  # as the summary tells, of what lies at the beginning or the end

    @property
    def num_known(self) -> int | None:
        """How many steps are missing; None if nothing tells."""
        if self.after_step is None or self.before_step is None:
            return self.num_steps
        return self.before_step - self.after_step - 1

    def covers(self, other: "Loss") -> bool:
        """Whether all steps of another one are of this one too."""
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
    """The losses that a file tells of.

    Raises:
        msgspec.DecodeError: what it says cannot be read.
    """
    return msgspec.json.decode(metadata.get(_KEY, ""), type=list[Loss])


def merged(earlier: Sequence[Loss], later: Sequence[Loss]) -> list[Loss]:
    """The losses of a file that was repaired before and has lost more since."""
    found = []
    for loss in later:
        # Of a beginning or an end that was cut twice nothing tells how many steps it had.
        is_known = not any(loss.covers(each) for each in earlier)
        found.append(loss if is_known else loss._replace(num_steps=None))
    found += [each for each in earlier if not any(loss.covers(each) for loss in later)]
    return sorted(found, key=lambda loss: -1 if loss.after_step is None else loss.after_step)
