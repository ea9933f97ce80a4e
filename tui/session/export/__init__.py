"""Exports a part of a session in a chosen format, on its own thread.

May import: recordings, recordings.export, recordings.file, recordings.history, tui.settings,
  tui.views.
A new format gets a `FormatChoice` in `order.py`.
"""
