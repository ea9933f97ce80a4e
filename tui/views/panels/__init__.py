"""Panels of the main screen: pure functions from a frame to lines.

May import: engine.protocol, recordings.attribution, recordings.history, recordings.session,
  recordings.state, tui.settings, tui.views, tui.views.frame.
The knobs' panel is drawn in `pages/knobs_page.py`, the lanes in `charts/lanes.py`; key figures and
verdict are in `header.py`. A new panel gets a file here, its place in `layout.py`,
its entry in `screens/canvas.py`.
"""
