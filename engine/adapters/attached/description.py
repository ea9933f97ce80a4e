"""Helpers to describe an attached engine: its endpoint, and values that it may lack."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from stepscope.engine.protocol.settings.engine_config import MAX_LEVEL_MS
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint

_T = TypeVar("_T")


def rank_endpoint(text: str, rank: int, size: int) -> Endpoint:
    """Return the endpoint of one data-parallel rank.

    With several ranks, rank N of `vllm-0` has the endpoint `vllm-0.dpN`. For a TCP address, rank N
    adds 2 * N to the port.

    Args:
        text: an endpoint as in STEPSCOPE_ENDPOINT.
        size: number of data-parallel ranks, as far as this rank knows.

    Raises:
        ConfigError: `text` is not an endpoint.
    """
    endpoint = Endpoint.parse(text)
    if rank or size > 1:
        address, _, port = endpoint.control.rpartition(":")
        own = f"{port}.dp{rank}" if endpoint.is_ipc else f"{int(port) + 2 * rank}"
        return Endpoint.parse(f"{address}:{own}")
    return endpoint


def service_level(variable: str) -> float | None:
    """Return the service level in ms that an environment variable sets; None if it sets none.

    Raises:
        ConfigError: it is not a number above 0.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    with suppress(ValueError):
        if 0 < (level := float(text)) <= MAX_LEVEL_MS:
            return level
    raise ConfigError("level", f"{variable}: expected milliseconds above 0, got {text!r}")


def known(get: Callable[[], _T]) -> _T | None:
    """Return what `get` returns.

    None if it raises an error, because this version lacks the value.
    """
    try:
        return get()
    except Exception:  # noqa: BLE001 - after any error the value is unknown
        return None
