"""The OpenAI-compatible HTTP server: a separate process that talks to an engine's sockets.

Does not import torch. What its packages share is here: errors, settings and the connection to the
engine.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport.
Add routes to `server`, request fields to `openai`, metrics to `metrics`.
"""
