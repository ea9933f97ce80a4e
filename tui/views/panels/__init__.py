"""Panels of the main screen: pure functions from a frame to lines.

May import: engine.protocol, recordings.attribution, recordings.history, recordings.session,
  recordings.state, tui.settings, tui.views, tui.views.frame.
A new panel gets a file here, its place in `layout.py`, its entry in `screens/canvas.py`.
"""
