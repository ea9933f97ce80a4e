"""`AttachedKnobs`: the knobs (runtime settings) of an attached engine, under stepscope's names."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from stepscope.engine.protocol.settings.knobs import ConfigError, Limits, checked
from stepscope.engine.protocol.wire import KnobSpec, KnobValue


class KnobWriter(Protocol):
    """Sets knobs of one scheduler. Use it between two steps."""

    def write(self, values: Mapping[str, KnobValue]) -> None:
        """Set these knobs. They apply from the next step that the engine schedules."""
        ...

    def restore(self) -> None:
        """Restore the values that the engine had before stepscope changed them."""
        ...


class AttachedKnobs:
    """All settings that stepscope shows, some of which can change while the engine runs.

    Args:
        engine: the engine's name, for messages.

    Attributes:
        limits: the values at engine start, which bound the knobs.
        values: the current values, by name.
        specs: the knobs that can change.
        is_deferred: whether only the engine's thread may apply changes, by calling
            `AttachedCore.apply_deferred`.
    """

    def __init__(
        self,
        engine: str,
        limits: Limits,
        values: dict[str, KnobValue],
        specs: Sequence[KnobSpec],
        writer: KnobWriter,
        *,
        is_deferred: bool = False,
    ) -> None:
        self._engine = engine
        self.limits = limits
        self.values = values
        self.specs = tuple(specs)
        self._writer = writer
        self.is_deferred = is_deferred
        self.restore = writer.restore

    def changed(self, changes: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        """Return the values with `changes` applied, without setting them.

        Raises:
            ConfigError: an unknown or fixed knob, a wrong type, a value outside its bounds.
        """
        known = {spec.name: spec for spec in self.specs}
        live = ", ".join(known) or "none"
        for name in changes:
            if name in known:
                continue
            if name not in self.values:
                raise ConfigError("unknown_knob", f"no knob is called {name!r}; there are: {live}")
            raise ConfigError(
                "fixed_knob",
                f"{name} is fixed when {self._engine} starts; "
                f"while it runs these can be changed: {live}",
            )
        return self.values | {name: checked(known[name], changes[name]) for name in changes}

    def set(self, changes: Mapping[str, KnobValue]) -> None:
        """Set the knobs that `changes` changes. Raises ConfigError as `changed` does."""
        before, self.values = self.values, self.changed(changes)
        if new := dict(self.values.items() - before.items()):
            self._writer.write(new)
