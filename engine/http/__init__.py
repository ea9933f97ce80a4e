"""The OpenAI-compatible HTTP server: a process of its own that talks to an engine's sockets.
Free of torch. Here is what its rooms share: errors, settings, the connection to the engine.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport.
A route goes into `server`, a field of a request into `openai`, a metric into `metrics`.
"""
