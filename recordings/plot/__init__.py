"""Draws plots of a recording for a report. Needs matplotlib (the `export` extra).

May import: engine.protocol, recordings, recordings.export, recordings.file, recordings.session,
  recordings.state.
A new panel is a function in `figure.py` and an entry in `PANELS`.
"""
