"""A session in memory: one writer, many readers, any step of it again. Also its sources' seam.

May import: engine.protocol, recordings, recordings.attribution, recordings.figures,
  recordings.file, recordings.file.writing, recordings.history.ring, recordings.state,
  recordings.state.series.
What a screen asks of a session goes into `history_view.py`.
"""
