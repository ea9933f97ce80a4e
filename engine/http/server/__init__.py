"""The HTTP process: its routes, checks of every request, start and shutdown.

May import: engine.client, engine.http, engine.http.metrics, engine.http.openai,
  engine.protocol, engine.protocol.settings, engine.transport.
Add a route to `app.py`.
"""
