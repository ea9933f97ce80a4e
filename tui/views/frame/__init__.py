"""The data that the dashboard draws one picture from, taken from the history at one moment.

Also here, beside what it draws: the table of the fleet (`fleet_view.py`).
The history is the session (an engine's steps) that the dashboard keeps in memory.

May import: engine.protocol, recordings, recordings.attribution, recordings.compare,
  recordings.file, recordings.fleets, recordings.history, recordings.replay, recordings.samples,
  recordings.session, recordings.state, tui.settings, tui.views.
Data that a panel needs from a session becomes a field of `Frame`.
"""
