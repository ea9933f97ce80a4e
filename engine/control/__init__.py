"""The control socket's thread: it decodes, checks and answers what clients send. Free of torch.

May import: engine.loop, engine.protocol, engine.protocol.settings, engine.telemetry,
  engine.text, engine.transport.
A check that needs nothing from the engine goes here and costs the engine's thread no time.
"""
