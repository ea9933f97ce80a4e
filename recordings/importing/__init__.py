"""Reads logs and results of other tools, one file a format; lays results beside recordings.

May import: engine.protocol, recordings, recordings.file, recordings.history, recordings.live,
  recordings.session, recordings.simulation, recordings.state.
A new format goes here: a function that recognises its file, and its line in `imported.FORMATS`.
"""
