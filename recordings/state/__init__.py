"""The reducer of a session: requests, blocks, pauses, clocks; texts of knobs and audit entries.

May import: engine.protocol, engine.protocol.settings, recordings.packing.
New state of an engine, as derived from its messages, goes into `session.py` or one of its parts.
"""
