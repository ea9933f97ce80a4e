"""What runs on the engine's thread: the core loop, the pipeline of steps, command handlers, token
delivery and the audit trail; and the inbox that other threads write to. Needs no torch.

May import: engine.protocol, engine.scheduling, engine.telemetry, engine.text, engine.transport,
  engine.workload.
A new command gets a handler in `dispatch.py`, or in `changes.py` if it changes the engine.
"""
