"""Helpers to describe an attached engine: its endpoint, and values that it may lack."""

from collections.abc import Callable
from typing import TypeVar

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
        ConfigError: `text` is not an endpoint, or other machines could reach it.
    """
    endpoint = Endpoint.parse(text)
    if rank or size > 1:
        address, _, port = endpoint.control.rpartition(":")
        own = f"{port}.dp{rank}" if endpoint.is_ipc else f"{int(port) + 2 * rank}"
        endpoint = Endpoint.parse(f"{address}:{own}")
    endpoint.check_private()
    return endpoint


def known(get: Callable[[], _T]) -> _T | None:
    """Return what `get` returns.

    None if it raises an error, because this version lacks the value.
    """
    try:
        return get()
    except Exception:  # noqa: BLE001 - after any error the value is unknown
        return None
