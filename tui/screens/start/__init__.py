"""The start screen: a list of engines on this machine, recordings, samples and the demo.

May import: recordings.samples, tui.screens, tui.screens.drawing, tui.screens.overlays,
  tui.session, tui.settings, tui.views, tui.views.pages.
The entries it lists are made in `views/pages/start_list.py`.
"""
