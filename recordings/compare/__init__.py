"""Compares two runs: figures, load, settings, and which run is better in each figure.

May import: engine.protocol, recordings.attribution, recordings.compare.side,
  recordings.compare.statistics, recordings.figures, recordings.file, recordings.state.series.
A new figure goes into `figures.py`, its sum into `side/totals.py`.
"""
