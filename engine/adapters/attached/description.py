"""What any attached engine's description needs: its endpoint, and values it may not have."""

from collections.abc import Callable
from typing import TypeVar

from stepscope.engine.transport.endpoints import Endpoint

_T = TypeVar("_T")


def rank_endpoint(text: str, rank: int, size: int) -> Endpoint:
    """The endpoint of one data-parallel rank.

    Rank n of `vllm-0` is `vllm-0.dpN`; of a TCP address it has the port 2 * n higher.

    Args:
        text: as in STEPSCOPE_ENDPOINT.
        size: of the group, as far as this rank knows.

    Raises:
        ConfigError: it is no endpoint, or one that other machines can reach.
    """
    if rank or size > 1:
        if text.startswith("tcp://"):
            address, _, port = text.rpartition(":")
            text = f"{address}:{int(port) + 2 * rank}"
        else:
            text += f".dp{rank}"
    endpoint = Endpoint.parse(text)
    endpoint.check_private()
    return endpoint


def known(get: Callable[[], _T]) -> _T | None:
    """A value of the engine; None where this version keeps it elsewhere."""
    try:
        return get()
    except Exception:  # noqa: BLE001 - whatever it is, the value is unknown
        return None
