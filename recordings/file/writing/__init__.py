"""Recordings while they are written: one file or a series, on a thread of its own.

May import: engine.protocol, recordings, recordings.file, recordings.file.mcap,
  recordings.packing, recordings.state.
What decides what is written, and when a file ends, goes here.
"""
