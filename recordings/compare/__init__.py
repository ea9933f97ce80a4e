"""Compares two runs, A and B: figures, load, settings, and which run is better in each figure.

A side is one of the two runs.

May import: engine.protocol, recordings.attribution, recordings.compare.side,
  recordings.figures, recordings.file, recordings.session, recordings.state,
  recordings.state.series.
A new figure goes into `figures.py`, its sum into `session/sums.py`.
"""
