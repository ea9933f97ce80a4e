"""Describes an attached engine: endpoint, values that it may lack, its knobs (`AttachedKnobs`)."""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec

from stepscope.engine.protocol.engine_config import MAX_LEVEL_MS
from stepscope.engine.protocol.knobs import ConfigError, Limits, checked, knob_specs
from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.engine.transport.endpoints import Endpoint

_T = TypeVar("_T")


def rank_endpoint(text: str, rank: int, size: int) -> Endpoint:
    """Return the endpoint of one of `size` data-parallel ranks, as far as this rank knows.

    With several ranks, rank N of `vllm-0` has the endpoint `vllm-0.dpN`. For a TCP address, rank N
    adds 2 * N to the port. Raises ConfigError: `text` is not an endpoint.
    """
    endpoint = Endpoint.parse(text)
    if rank or size > 1:
        address, _, port = endpoint.control.rpartition(":")
        own = f"{port}.dp{rank}" if endpoint.is_ipc else f"{int(port) + 2 * rank}"
        return Endpoint.parse(f"{address}:{own}")
    return endpoint


def _service_level(variable: str) -> float | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    with suppress(ValueError):
        if 0 < (level := float(text)) <= MAX_LEVEL_MS:
            return level
    raise ConfigError("level", f"{variable}: expected milliseconds above 0, got {text!r}")


def described(engine: str, endpoint: Endpoint, knobs: "AttachedKnobs") -> EngineInfo:
    """Return what is alike in the descriptions of attached engines.

    Raises ConfigError: a service level in the environment is wrong.
    """
    return EngineInfo(
        engine_id=uuid.uuid4().hex,
        name=endpoint.name,
        software_version=version("stepscope"),
        pid=os.getpid(),
        model="",
        **msgspec.structs.asdict(knobs.limits),
        knobs=knobs.specs,
        telemetry_endpoint=endpoint.telemetry,
        control_endpoint=endpoint.control,
        monotonic_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        keeps_snapshots=True,
        engine=engine,
        slo_ttft_ms=_service_level("STEPSCOPE_SLO_TTFT_MS"),
        slo_itl_ms=_service_level("STEPSCOPE_SLO_ITL_MS"),
    )


def known(get: Callable[[], _T]) -> _T | None:
    """Return what `get` returns; None if it raises, because this version lacks the value."""
    with suppress(Exception):
        return get()
    return None


class AttachedKnobs:
    """All settings that stepscope shows, some of which can change while the engine runs.

    Args:
        live: the knobs that can change, and how their specs differ from those of our engine.
        write: sets knobs between two steps; they apply from the next step that is scheduled.

    Attributes:
        limits: the values at engine start, which bound the knobs.
        specs: of the knobs that can change.
        is_deferred: whether only the engine's thread may apply changes, by calling
            `AttachedCore.apply_deferred`.
    """

    def __init__(
        self,
        engine: str,
        limits: Limits,
        values: dict[str, KnobValue],
        live: Mapping[str, Mapping[str, Any]],
        write: Callable[[Mapping[str, KnobValue]], None],
        *,
        is_deferred: bool = False,
    ) -> None:
        self._engine, self._write = engine, write
        self.limits, self.is_deferred = limits, is_deferred
        self.values = self._start = values
        self.specs = tuple(
            msgspec.structs.replace(spec, **{"default": values[spec.name], **live[spec.name]})
            for spec in knob_specs(limits)
            if spec.name in live
        )

    def changed(self, changes: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        """Return the values with `changes` applied, without setting them.

        Raises ConfigError: an unknown or fixed knob, a wrong type, a value outside its bounds.
        """
        known = {spec.name: spec for spec in self.specs}
        live = ", ".join(known) or "none"
        for name in changes.keys() - known.keys():
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
        self._become(self.changed(changes))

    def restore(self) -> None:
        self._become(self._start)

    def _become(self, values: dict[str, KnobValue]) -> None:
        before, self.values = self.values, values
        if new := dict(values.items() - before.items()):
            self._write(new)
