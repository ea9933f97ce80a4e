"""The dashboard as an application: its screens, signal handling, shutdown, and pictures of it.

May import: recordings, recordings.alerts, recordings.compare, recordings.export,
  recordings.file, recordings.fleets, recordings.history, recordings.live, recordings.replay,
  tui.screens, tui.session, tui.settings, tui.views, tui.views.frame.
Code that concerns the whole process while the dashboard runs goes here.
"""
