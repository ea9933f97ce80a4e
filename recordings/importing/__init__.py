"""Reads logs and results of other tools; lays results beside recordings.

May import: engine.protocol, recordings, recordings.file, recordings.history,
  recordings.session, recordings.simulation, recordings.state.
A new result is a function and an entry of `client_results.FORMS`, a new log an entry of `LOGS`.
"""
