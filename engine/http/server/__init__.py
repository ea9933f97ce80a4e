"""The HTTP process: routes, what every request passes, start and end.

May import: engine.client, engine.control, engine.http, engine.http.metrics, engine.http.openai,
  engine.protocol, engine.protocol.settings, engine.transport.
A new route goes into `app.py`.
"""
