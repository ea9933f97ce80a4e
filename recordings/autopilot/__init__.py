"""An autopilot: changes knobs to hold a service level, based on the steps of a running engine.

May import: engine.client, engine.protocol, engine.simulation, engine.transport,
  recordings.history, recordings.live, recordings.session, recordings.simulation,
  recordings.state.
`pilot.py` decides, without contact to an engine. Its `StepSamples` tell the engine's speed, its
`Load` the load. `live_pilot.py` feeds it the steps of an engine and sends its decisions there.
"""
