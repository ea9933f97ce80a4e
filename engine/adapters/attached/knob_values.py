"""The knobs (runtime settings) of an attached engine, under stepscope's names.

A knob can be read, and set to a value within its bounds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from stepscope.engine.protocol.settings.knobs import ConfigError, Limits
from stepscope.engine.protocol.wire import KnobSpec, KnobValue

_TYPES = {"int": int, "float": float}


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
    shown = knobs.__struct_fields__
    checked = {name: _checked(engine, shown, specs, name, value) for name, value in changes.items()}
    return msgspec.structs.replace(knobs, **checked)


def _checked(
    engine: str,
    shown: Sequence[str],
    specs: Sequence[KnobSpec],
    name: str,
    value: KnobValue,
) -> KnobValue:
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None:
        live = ", ".join(spec.name for spec in specs) or "none"
        if name not in shown:
            raise ConfigError("unknown_knob", f"no knob is called {name!r}; there are: {live}")
        raise ConfigError(
            "fixed_knob",
            f"{name} is fixed when {engine} starts; while it runs these can be changed: {live}",
        )
    if spec.kind == "choice":
        if value not in spec.choices:
            choices = ", ".join(spec.choices)
            raise ConfigError("out_of_bounds", f"{name} is one of {choices}, not {value!r}")
        return value
    if spec.kind == "float" and type(value) is int:
        value = float(value)
    if type(value) is not _TYPES[spec.kind] or not isinstance(value, int | float):
        raise ConfigError("wrong_type", f"{name} takes a number, not {value!r}")
    assert spec.low is not None
    if spec.high is None:
        if value < spec.low:
            raise ConfigError("out_of_bounds", f"{name} is at least {spec.low:g}, not {value!r}")
    elif not spec.low <= value <= spec.high:
        raise ConfigError(
            "out_of_bounds",
            f"{name} must be between {spec.low:g} and {spec.high:g} (the value at "
            f"{engine}'s start), not {value!r}",
        )
    return value
