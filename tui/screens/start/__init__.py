"""The start screen: engines found here, recordings, samples, the demo.

May import: recordings.samples, tui.screens.overlays, tui.session, tui.settings, tui.views,
  tui.views.pages.
What it lists is data in `views/pages/start_list.py`.
"""
