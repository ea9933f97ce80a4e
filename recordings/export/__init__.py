"""Exports recordings to other formats, without loading a whole session.

May import: engine.protocol, engine.workload, recordings, recordings.check, recordings.file,
  recordings.state.
A new format gets a name in `Format`, a branch in `export.py`, and a module if it is long.
"""
