"""Recordings for other programs. One module a format; none holds more than a part of a session.

May import: engine.protocol, engine.workload, recordings, recordings.check, recordings.file,
  recordings.state.
A new format gets a module, a name in `Format` and a branch in `export.py`.
"""
