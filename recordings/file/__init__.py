"""Recordings as files: reading and seeking, their metadata, names, permissions and locks.

May import: engine.protocol, recordings, recordings.file.mcap, recordings.session,
  recordings.state.
Code that reads a file goes here, code that writes one into `writing`, and MCAP bytes into `mcap`.
"""
