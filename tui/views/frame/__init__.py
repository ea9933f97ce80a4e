"""The data that one picture is drawn from, taken from the history at one moment.

May import: engine.protocol, recordings, recordings.attribution, recordings.compare,
  recordings.compare.side, recordings.figures, recordings.file, recordings.fleets,
  recordings.history, recordings.samples, recordings.state, recordings.state.series,
  tui.settings, tui.views.
Data that a panel needs from a session becomes a field of `Frame`.
"""
