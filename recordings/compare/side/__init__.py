"""One of two runs, reduced message by message in bounded memory, and the feeds that read it.

May import: engine.protocol, recordings, recordings.attribution, recordings.figures,
  recordings.file, recordings.history, recordings.state, recordings.state.series.
A new count or sum over a run goes here.
"""
