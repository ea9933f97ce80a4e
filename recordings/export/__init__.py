"""Recordings in other formats, one module each. None loads a whole session into memory.

May import: engine.protocol, engine.workload, recordings, recordings.check, recordings.file,
  recordings.state.
A new format gets a module, a name in `Format` and a branch in `export.py`.
"""
