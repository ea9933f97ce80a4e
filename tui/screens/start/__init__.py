"""The start screen: engines found here, recordings, samples, the demo.

May import: recordings.samples, tui.screens.overlays, tui.session, tui.settings, tui.views,
  tui.views.pages.
The entries it lists are made in `views/pages/start_list.py`.
"""
