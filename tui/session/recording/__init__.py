"""Recordings that are started from the dashboard.

May import: recordings.file, recordings.file.mcap, recordings.history, recordings.live,
  tui.settings, tui.views.
What the record key does goes here.
"""
