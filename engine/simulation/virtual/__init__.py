"""Engines on a virtual clock: their requests, one replica, a cluster of them, a recorded session.

May import: engine.loop, engine.protocol, engine.protocol.settings, engine.scheduling,
  engine.simulation, engine.text, engine.workload.
A new way to run simulated engines gets a file here; a model of step times gets one in
`engine/simulation`.
"""
