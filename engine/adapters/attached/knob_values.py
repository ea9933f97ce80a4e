"""The knobs (runtime settings) of an attached engine, under stepscope's names.

A knob can be read, and set to a value within its bounds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from stepscope.engine.protocol.settings.knobs import ConfigError, Limits, checked
from stepscope.engine.protocol.wire import KnobSpec, KnobValue


class KnobValues(Protocol):
    """The settings of one engine that stepscope shows. Implementations are msgspec structs."""

    def as_dict(self) -> dict[str, KnobValue]: ...


_Knobs = TypeVar("_Knobs", bound=msgspec.Struct)


class KnobBoard(Protocol):
    """Reads and sets the knobs of one scheduler.

    Attributes:
        limits: the values at engine start, which bound the knobs.
        is_deferred: whether only the engine's thread may apply changes, by calling
            `AttachedCore.apply_deferred`.
    """

    limits: Limits
    is_deferred: bool

    @property
    def knobs(self) -> Any:
        """The current values, as `KnobValues`."""
        ...

    def changed(self, changes: Mapping[str, KnobValue]) -> Any:
        """Return the knobs with `changes` applied, without setting them.

        Raises:
            ConfigError: an unknown or fixed knob, a wrong type, a value outside its bounds.
        """
        ...

    def set(self, knobs: Any) -> None:
        """Set the knobs. They apply from the next step that the engine schedules."""
        ...

    def restore(self) -> None:
        """Restore the values that the engine had before stepscope changed them."""
        ...


def changed(
    engine: str, knobs: _Knobs, specs: Sequence[KnobSpec], changes: Mapping[str, KnobValue]
) -> _Knobs:
    """Return the knobs with `changes` applied, after checking each change.

    Raises:
        ConfigError: an unknown or fixed knob, a wrong type, a value outside its bounds.
    """
    known, values = {spec.name: spec for spec in specs}, {}
    for name, value in changes.items():
        if name in known:
            values[name] = checked(known[name], value)
            continue
        live = ", ".join(known) or "none"
        if name not in knobs.__struct_fields__:
            raise ConfigError("unknown_knob", f"no knob is called {name!r}; there are: {live}")
        raise ConfigError(
            "fixed_knob",
            f"{name} is fixed when {engine} starts; while it runs these can be changed: {live}",
        )
    return msgspec.structs.replace(knobs, **values)
