"""Exports a part of a session in a chosen format, on a thread of its own.

May import: recordings, recordings.export, recordings.file, recordings.history, tui.settings,
  tui.views.
A new format gets a `FormatChoice` in `order.py`.
"""
