"""`PeerLimit`: limits what the clients of the HTTP port hold, in total and per peer (address)."""

import ipaddress
from collections import Counter
from typing import Literal


class PeerLimit:
    """Counts connections or bytes. Use it on the server's event loop only.

    Args:
        most: what all peers together may hold.
        most_each: what one peer may hold.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self.most = most
        self.most_each = most_each
        self._of: Counter[str] = Counter()
        self._total = 0

    def add(self, peer: str, number: int = 1) -> Literal["all", "peer"] | None:
        """Count more of a peer. Counts nothing, and says whose limit it is, if one is exceeded."""
        if self._total + number > self.most:
            return "all"
        if self._of[peer] + number > self.most_each:
            return "peer"
        self._of[peer] += number
        self._total += number
        return None

    def remove(self, peer: str, number: int = 1) -> None:
        self._total -= number
        self._of[peer] -= number
        if not self._of[peer]:
            del self._of[peer]


def peer_of(address: str | None) -> str:
    """Return an IPv4 address, or an IPv6 /64 network, which one user typically has."""
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
