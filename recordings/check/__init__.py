"""Whether a recording is whole, and making a whole one of what is left of it.

May import: engine.protocol, recordings, recordings.file, recordings.file.mcap,
  recordings.file.writing, recordings.state.
A new check goes into `verify.py`.
"""
