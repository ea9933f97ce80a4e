"""Measurements of an engine on this machine: `stepscope bench`.

May import: engine.client, engine.control, engine.loop, engine.process, engine.protocol,
  engine.protocol.settings, engine.scheduling, engine.telemetry.
A new measurement gets a file here; what only a GPU can show goes into `gpu`.
"""
