"""How another process asks an engine: the control client, its errors, and the buffer that puts
messages back in order. Free of torch.

May import: engine.protocol, engine.transport.
What a client may do with an engine goes here; what the engine does with it, into `control`.
"""
