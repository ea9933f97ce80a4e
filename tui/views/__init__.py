"""The looks of the dashboard: glyphs, styles, lines of styled runs, layout, notices.

May import: engine.protocol, recordings.attribution, recordings.state, tui.settings.
A new style goes into `theme.py`; a widget names a style, never a colour.
"""
