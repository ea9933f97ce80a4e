"""`Peers`: counts and limits connections to the HTTP port, in total and per peer.

A peer is a client address.
"""

import ipaddress
from collections import Counter


class Peers:
    """Counts open connections. Use it on the server's event loop only.

    Args:
        most: maximum number of connections in total.
        most_each: maximum number of connections of one peer.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._counts: Counter[str] = Counter()
        self._total = 0

    def enter(self, peer: str) -> str | None:
        """Count a new connection. Returns None, or why the connection must be refused."""
        if self._total >= self._most:
            return f"this server has {self._most} connections already; try again later"
        if self._counts[peer] >= self._most_each:
            return f"you have {self._most_each} connections already; close some"
        self._counts[peer] += 1
        self._total += 1
        return None

    def leave(self, peer: str) -> None:
        self._total -= 1
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]


def peer_of(address: str | None) -> str:
    """Return the peer that an address counts for: an IPv4 address, or an IPv6 /64 network.

    One IPv6 user typically has a whole /64 network.
    """
    if address is None:
        return ""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
