"""A session in memory, with random access to its steps: one writer, many readers. Also `Source`.

May import: engine.protocol, recordings, recordings.attribution, recordings.figures,
  recordings.file, recordings.file.writing, recordings.history.ring, recordings.state,
  recordings.state.series.
A new query about a session, such as a screen needs, goes into `history_view.py`.
"""
