"""A knob change before it is sent, and the knobs as the operator sees them."""

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

    def changed_by(self, name: str) -> str:
        """Return who changed a knob last; empty if unknown."""
        return next((each.who for each in reversed(self.changes) if name in each.new), "")


class KnobChange(NamedTuple):
    """A new value for a knob, chosen while the knobs had this `version`."""

    name: str
    value: KnobValue
    version: int
