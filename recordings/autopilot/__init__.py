"""Knobs that hold a service level, chosen from the steps of a running engine.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.simulation,
  engine.transport, recordings.history, recordings.live, recordings.simulation,
  recordings.state.
`pilot.py` decides, and asks no engine: it knows the engine's speed from `step_samples.py` and its
load from `load.py`. `live_pilot.py` brings it the steps of an engine and carries its moves out.
"""
