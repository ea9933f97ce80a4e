"""Exports recordings to other formats, one module each, without loading a whole session.

May import: engine.protocol, engine.workload, recordings, recordings.check, recordings.file,
  recordings.state, recordings.state.series.
A new format gets a module, a name in `Format` and a branch in `export.py`.
"""
