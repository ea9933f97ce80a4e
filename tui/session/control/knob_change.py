"""`KnobsNow`: an engine's knobs as the operator sees them; `KnobChange`: a change not sent yet."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.wire import KnobsChanged, KnobSpec, KnobValue


class KnobsNow(NamedTuple):
    """The knobs of an engine, and their known changes, oldest first."""

    version: int
    values: Mapping[str, KnobValue]
    changes: Sequence[KnobsChanged]
    specs: tuple[KnobSpec, ...]

    def since(self, version: int) -> list[KnobsChanged]:
        return [change for change in self.changes if change.version > version]


class KnobChange(NamedTuple):
    """A new value for a knob.

    `version` is the version of the engine's knobs when the operator chose the value. If the knobs
    have a later version when the change arrives, the engine refuses the change.
    """

    name: str
    value: KnobValue
    version: int
