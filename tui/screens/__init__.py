"""The main screen: it turns keys and mouse into actions, and draws a few times a second.

May import: engine.protocol, recordings.history, recordings.replay, tui.screens.drawing,
  tui.screens.handlers, tui.session, tui.session.control, tui.session.time, tui.session.tour,
  tui.settings, tui.views, tui.views.frame.
The code for an action goes into `handlers`, what opens above the screen into `overlays`.
"""
