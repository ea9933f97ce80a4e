"""Checks whether a recording is whole, repairs damaged ones, and strips prompts and outputs.

May import: engine.protocol, recordings, recordings.file, recordings.file.mcap,
  recordings.file.writing, recordings.session, recordings.state.
A new check goes into `verify.py`.
"""
