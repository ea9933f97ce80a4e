"""The reducer of a session: requests, blocks, pauses, clocks; texts of knobs and audit entries.

May import: engine.protocol, engine.protocol.settings, recordings.packing.
What an observer knows of an engine after a message goes into `session.py` or a part of it.
"""
