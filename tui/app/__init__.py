"""The dashboard as an application: its screens, its signals, its end, and pictures of it.

May import: recordings.alerts, recordings.compare, recordings.export, recordings.file,
  recordings.fleets, recordings.history, recordings.live, recordings.replay, tui.screens,
  tui.screens.handlers, tui.screens.overlays, tui.session, tui.session.time, tui.session.tour,
  tui.settings, tui.views, tui.views.frame.
What holds for the whole process while the dashboard runs goes here.
"""
