"""Lets another process talk to an engine. Does not import torch.

Has the client of the control socket, and the buffer that puts telemetry messages back in order.

May import: engine.protocol, engine.transport.
The client's part of a command goes here, the engine's part into `control`.
"""
