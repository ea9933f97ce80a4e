"""One of two runs, reduced message by message in bounded memory, and what it is fed from.

May import: engine.protocol, recordings, recordings.attribution, recordings.figures,
  recordings.file, recordings.history, recordings.state, recordings.state.series.
What is counted of a run goes here.
"""
