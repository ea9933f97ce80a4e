"""Engines on a virtual clock: what arrives, one replica, several of them, a whole session.

May import: engine.loop, engine.protocol, engine.protocol.settings, engine.scheduling,
  engine.simulation, engine.text, engine.workload.
A new way to run simulated engines gets a file here; a model of step times goes one room up.
"""
