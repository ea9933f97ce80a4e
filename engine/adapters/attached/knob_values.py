"""What an operator may change of an attached engine, by our names, within its start values."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from stepscope.engine.protocol.settings.config_error import ConfigError
from stepscope.engine.protocol.settings.knobs import Limits
from stepscope.engine.protocol.wire import KnobSpec, KnobValue

_TYPES = {"int": int, "float": float}


class KnobValues(Protocol):
    """All settings of one engine that are shown; a msgspec struct."""

    def as_dict(self) -> dict[str, KnobValue]: ...


_Knobs = TypeVar("_Knobs", bound=msgspec.Struct)


class KnobBoard(Protocol):
    """Reads and sets the knobs of one scheduler.

    Attributes:
        limits: the start values.
        is_deferred: only the engine's thread may change them, and not at any time:
            `AttachedCore.apply_deferred`.
    """

    limits: Limits
    is_deferred: bool

    @property
    def knobs(self) -> Any:
        """As they are now: `KnobValues`."""
        ...

    def changed(self, changes: Mapping[str, KnobValue]) -> Any:
        """The knobs with `changes` applied; nothing is set.

        Raises:
            ConfigError: an unknown or fixed knob, a wrong type, a value outside its bounds.
        """
        ...

    def set(self, knobs: Any) -> None:
        """They hold from the next step that is scheduled."""
        ...

    def restore(self) -> None:
        """Put the engine's own values back."""
        ...


def changed(
    engine: str, knobs: _Knobs, specs: Sequence[KnobSpec], changes: Mapping[str, KnobValue]
) -> _Knobs:
    """The knobs with `changes` applied.

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
    assert spec.high is not None
    if not spec.low <= value <= spec.high:
        raise ConfigError(
            "out_of_bounds",
            f"{name} must be between {spec.low:g} and {spec.high:g}, with which {engine} was "
            f"started, not {value!r}",
        )
    return value
