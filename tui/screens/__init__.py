"""The main screen: it turns keys and mouse into actions, and draws a few times a second.

May import: recordings.samples, tui.screens.drawing, tui.screens.handlers, tui.screens.overlays,
  tui.session, tui.settings, tui.views, tui.views.frame, tui.views.pages, tui.views.panels.
The code for an action goes into `handlers`, what opens above the screen into `overlays`.
"""
