"""Plays a recorded session from a file, with seeking, and with what its index tells.

May import: engine.protocol, recordings, recordings.attribution, recordings.file,
  recordings.history, recordings.session, recordings.state.
What is found in a whole file, from its indexes, goes into `file_index.py`.
"""
