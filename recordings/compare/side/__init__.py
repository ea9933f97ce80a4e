"""`Side`: one of two compared runs, read message by message in bounded memory.

Also here: the feeds that read a run from a file or from memory.

May import: engine.protocol, recordings, recordings.attribution, recordings.figures,
  recordings.file, recordings.history, recordings.session, recordings.state,
  recordings.state.series.
A new sum over a run goes into `session/totals.py`, what is known of each request in here.
"""
