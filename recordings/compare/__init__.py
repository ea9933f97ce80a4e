"""Two runs compared: figures, load, settings, and who is better in what.

May import: engine.protocol, recordings.attribution, recordings.compare.side,
  recordings.compare.statistics, recordings.figures, recordings.file, recordings.state.series.
A new figure goes into `figures.py`, its sum into `side/totals.py`.
"""
