"""What the engine publishes: the draft of each step, its rows, snapshots, the heartbeat, and the
publisher with what it keeps for observers who missed some. `native/` sends without Python.
Free of torch.

May import: engine.protocol, engine.protocol.settings, engine.scheduling, engine.text,
  engine.transport, engine.workload.
A new field of a step is filled in `step_draft.py`; its type is in `protocol`.
"""
