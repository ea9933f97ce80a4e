"""How a frame gets onto the screen: which widgets stand where, which lines are new.

May import: recordings.fleets, recordings.history, tui.session, tui.session.control,
  tui.session.time, tui.session.tour, tui.settings, tui.views, tui.views.charts,
  tui.views.frame, tui.views.pages, tui.views.panels.
A new panel gets its entry in `canvas.py`.
"""
