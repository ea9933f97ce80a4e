"""Charts: pure functions from a frame to lines.

May import: engine.protocol, recordings, recordings.attribution, recordings.compare,
  recordings.history, recordings.session, recordings.state, tui.views, tui.views.frame,
  tui.views.panels.
A new chart gets a file here.
"""
