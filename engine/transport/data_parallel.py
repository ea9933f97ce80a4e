"""Finds the ranks of a data-parallel vLLM. Each has an endpoint: `NAME.dp0`, `NAME.dp1` and so on.

vLLM runs the ranks of a dense model as separate engines. In that case rank 0 does not know that
there are others, so its endpoint is NAME, not `NAME.dp0`.
"""

import re

from stepscope.engine.transport.endpoints import Endpoint, find_local

_RANK = re.compile(r"(?P<group>.+)\.dp(?P<rank>\d+)")


def siblings_of(rank: Endpoint) -> list[Endpoint]:
    """Return the other ranks of a rank's data-parallel group that run on this machine."""
    match = _RANK.fullmatch(rank.control)
    group = rank.control if match is None else match["group"]
    return [each for each in ranks_of(group) if each.control != rank.control]


def ranks_of(text: str) -> list[Endpoint]:
    """Return the ranks of a data-parallel engine that run on this machine.

    `text` is `vllm-0` or an address like `ipc:///run/vllm`. Raises ConfigError: it is no endpoint.
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
