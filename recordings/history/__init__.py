"""A session (the telemetry of one engine) in memory, with random access to its steps.

One thread writes, many read. Also here: `Source`, which fills a history from an engine or a file.

May import: engine.protocol, recordings, recordings.attribution, recordings.file,
  recordings.file.writing, recordings.session, recordings.state.
A new query about a session, such as a screen needs, goes into `history_view.py`.
"""
