"""The ZeroMQ sockets of engines and clients: addresses, CURVE keys, the gate that checks them, and
limits on what a client may do. Needs no torch.

May import: engine.protocol.
A new socket is made in `sockets.py`; a new limit for connections gets its own file in this package.
"""
