"""Puts frames on the screen: where each widget is, and which of its lines have changed.

A frame is the data that one picture is drawn from.

May import: recordings.fleets, recordings.history, recordings.replay, tui.screens, tui.session,
  tui.session.control, tui.session.time, tui.session.tour, tui.settings, tui.views,
  tui.views.charts, tui.views.frame, tui.views.pages, tui.views.panels.
A new panel gets its entry in `canvas.py`.
"""
