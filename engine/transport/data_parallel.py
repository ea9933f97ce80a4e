"""The ranks of a data-parallel engine: one endpoint each, `NAME.dp0`, `NAME.dp1` and so on.

vLLM runs the ranks of a dense model as engines of their own, and its rank 0 does not know of the
others: it is called NAME.
"""

import re

from stepscope.engine.transport.endpoints import Endpoint, find_local

_RANK = re.compile(r"(?P<group>.+)\.dp(?P<rank>\d+)")


def siblings_of(rank: Endpoint) -> list[Endpoint]:
    """The other ranks of its group that run on this machine."""
    match = _RANK.fullmatch(rank.control)
    group = rank.control if match is None else match["group"]
    return [each for each in ranks_of(group) if each.control != rank.control]


def ranks_of(text: str) -> list[Endpoint]:
    """The ranks that run on this machine under one name; without any, the endpoint of that name.

    Args:
        text: as the user gave it: `vllm-0`, or an address like `ipc:///run/vllm`.

    Raises:
        ConfigError: it is no endpoint.
    """
    group = Endpoint.parse(text)
    ranks: dict[int, Endpoint] = {}
    for found in find_local():
        if found.control == group.control:
            ranks[0] = found
        match = _RANK.fullmatch(found.control)
        if match is not None and match["group"] == group.control:
            ranks[int(match["rank"])] = found
    return [ranks[rank] for rank in sorted(ranks)] or [group]
