"""Whole pages: pure functions from a frame to lines, and the targets of their rows.

A target is what Enter on a row opens.

May import: engine.adapters.metrics, engine.protocol, engine.transport, recordings.attribution,
  recordings.compare, recordings.file, recordings.file.mcap, recordings.fleets,
  recordings.history, recordings.session, recordings.state, tui.settings, tui.views,
  tui.views.charts, tui.views.frame, tui.views.panels.
A new page gets a file here and an entry in `page_views.py`.
"""
