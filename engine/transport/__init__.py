"""Every ZeroMQ socket of an engine or a client: addresses, CURVE keys, the gate, limits a client
has to keep. Free of torch.

May import: engine.protocol, engine.protocol.settings.
A new socket is made in `sockets.py`; a new limit on what a connection may cost gets a file here.
"""
