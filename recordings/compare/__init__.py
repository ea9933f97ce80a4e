"""Compares two runs, A and B: metrics, load, settings, and which run is better in each metric.

In names and texts here, a side is one of the two runs, and a figure is a metric.

May import: engine.protocol, recordings.attribution, recordings.compare.side,
  recordings.compare.statistics, recordings.figures, recordings.file, recordings.state.series.
A new figure goes into `figures.py`, its sum into `side/totals.py`.
"""
