"""The engine's thread: the core and its steps, the pipeline, what commands do, who gets tokens, the
audit trail, and the inbox that other threads write to. Free of torch.

May import: engine.protocol, engine.protocol.settings, engine.scheduling, engine.telemetry,
  engine.text, engine.transport, engine.workload.
What a new command does is one handler in `dispatch.py`, or `changes.py` if it changes the engine.
"""
