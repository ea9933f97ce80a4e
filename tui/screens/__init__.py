"""The main screen: it turns keys and mouse into actions, and draws a few times a second.

May import: engine.protocol, recordings, recordings.attribution, recordings.compare,
  recordings.export, recordings.file.mcap, recordings.fleets, recordings.history,
  recordings.samples, recordings.state, tui.session, tui.settings, tui.views, tui.views.charts,
  tui.views.frame, tui.views.pages, tui.views.panels.
The handlers of the action table act on a `SessionScreen` and its session; one file for each part of
the dashboard. A dialog above the screen derives from `Overlay` and is opened by `opening.py`. A new
panel gets its entry in `canvas.py`.
"""
