"""How things look: glyphs, styles, lines of styled runs, layout, notices.

May import: recordings.attribution, recordings.export, recordings.state,
  recordings.state.series, tui.settings.
A new style goes into `theme.py`; a widget names a style, never a colour.
"""
