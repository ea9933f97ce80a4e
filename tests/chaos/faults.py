"""`Faults`: random faults of connections, and how often each was injected."""

import random
from collections import Counter

from proxy import Proxies, Proxy

STALL_S = 7.0  # longer than a connection may be silent


class Faults:
    """Injects one fault at a time.

    Args:
        with_stalls: there is time for connections that carry nothing for `STALL_S`.
    """

    def __init__(self, proxies: Proxies, rng: random.Random, *, with_stalls: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._proxies = proxies
        self._rng = rng
        self._kinds = ["cut", "cut telemetry", "cut control", "delay", "refuse"]
        if with_stalls:
            self._kinds.append("stall")

    def one(self, proxy: Proxy) -> None:
        """Inject a fault into the connections of one client."""
        rng = self._rng
        kind = rng.choice(self._kinds)
        self.counts[kind] += 1
        if kind == "cut":
            self._proxies.do(proxy.cut())
        elif kind == "cut telemetry":
            self._proxies.do(proxy.cut(control=False))
        elif kind == "cut control":
            self._proxies.do(proxy.cut(telemetry=False))
        elif kind == "delay":
            self._proxies.do(proxy.delay(rng.uniform(0, 0.03), rng.uniform(0, 0.03)))
        elif kind == "refuse":
            self._proxies.do(proxy.refuse(rng.uniform(0.05, 0.4)))
        else:
            self._proxies.do(proxy.stall(STALL_S))
