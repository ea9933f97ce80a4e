"""Plays a recorded session from a file, with seeking and with searches of the whole file.

May import: engine.protocol, recordings, recordings.attribution, recordings.file,
  recordings.history, recordings.history.ring, recordings.session, recordings.state,
  recordings.state.series.
A new search of a whole file gets a file here.
"""
