"""What the engine publishes: step records and their rows, snapshots, the heartbeat; and the
publisher, which keeps messages for observers that missed some. `native/` is C code that sends
messages without holding Python's interpreter lock. Needs no torch.

May import: engine.protocol, engine.scheduling, engine.text, engine.transport.
A new field of a step is filled in `step_draft.py`; its type is in `protocol`.
"""
