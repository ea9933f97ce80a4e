"""Lets another process talk to an engine: the control client, its errors, and the buffer that puts
telemetry messages back in order. Does not import torch.

May import: engine.protocol, engine.transport.
The client's side of a command goes here, the engine's side into `control`.
"""
