"""Checks whether a recording is whole, and repairs damaged ones.

May import: engine.protocol, recordings, recordings.file, recordings.file.mcap,
  recordings.file.writing, recordings.state.
A new check goes into `verify.py`.
"""
