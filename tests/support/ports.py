"""`free_port`: a port for an engine that listens on TCP."""

import random
import socket

# Below those that systems give to clients: nobody gets one of them unasked.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    """The first of two neighbouring free ports: an endpoint takes both."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port
