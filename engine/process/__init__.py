"""Builds an engine from the other packages, serves until it is stopped, and cleans up.

May import: engine.control, engine.execution, engine.handover, engine.loop, engine.models,
  engine.protocol, engine.scheduling, engine.simulation, engine.telemetry, engine.transport,
  engine.workload.
A check that needs neither the model nor the machine goes into `check_settings`.
"""
