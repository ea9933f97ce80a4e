"""The OpenAI-compatible HTTP server: a separate process that talks to an engine's sockets.

Does not import torch. Errors, settings and the engine connection, which its packages share, are
here.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport.
Add routes to `server`, request fields to `openai`, metrics to `metrics`.
"""
