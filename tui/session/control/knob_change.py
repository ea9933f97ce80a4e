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
    """A new value for a knob; the engine refuses it if its knobs have a later `version`."""

    name: str
    value: KnobValue
    version: int
