"""Overlays, the dialogs above the main screen: prompts, editors, help, the palette.

May import: engine.protocol, recordings.attribution, recordings.state, tui.session,
  tui.session.control, tui.settings, tui.views, tui.views.pages.
A new overlay derives from `Overlay` and is opened by `handlers/opening.py`.
"""
