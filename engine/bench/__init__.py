"""Benchmarks of an engine on this machine: `stepscope bench`.

May import: engine.control, engine.execution, engine.loop, engine.process, engine.protocol,
  engine.scheduling, engine.telemetry.
Add a new benchmark as a file here; one for developers is a script in `tests/bench`.
"""
