"""What the operator does to an engine (knobs, workload, pauses), and under which name.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport,
  engine.workload, recordings.autopilot, recordings.history, recordings.state, tui.settings,
  tui.views.
A new way to change the engine is a method of `Operator`.
"""
