"""Which two runs are compared, and where in them the operator looks.

May import: recordings.compare, recordings.compare.side, recordings.history, tui.settings,
  tui.views.frame.
What can be chosen goes into the chooser.
"""
