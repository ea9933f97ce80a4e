"""Which two runs are compared, and where in them the operator looks.

May import: recordings, recordings.compare, recordings.compare.side, recordings.file,
  recordings.history, tui.session, tui.settings, tui.views.frame.
What can be chosen goes into the chooser.
"""
