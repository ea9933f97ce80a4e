"""The handlers of all actions in the action table, one file for each part of the dashboard.

May import: engine.protocol.settings, recordings, recordings.compare.side, recordings.export,
  recordings.file.mcap, recordings.history, recordings.state.series, tui.screens,
  tui.screens.drawing, tui.screens.overlays, tui.session, tui.session.control, tui.session.time,
  tui.settings, tui.views, tui.views.frame, tui.views.pages.
Handlers act on a `SessionScreen` (`tui/screens/drawing/session_screen.py`) and its session.
"""
