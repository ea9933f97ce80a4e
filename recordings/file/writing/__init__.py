"""Writes recordings: one file or a series of files, on a thread of its own.

May import: engine.protocol, recordings, recordings.file, recordings.file.mcap,
  recordings.session, recordings.state.
Decisions on what is written, and on when a file ends, go here.
"""
