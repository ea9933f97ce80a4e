"""State of the compare page: which two runs it compares, and which part of them it shows.

May import: recordings, recordings.compare, recordings.compare.side, recordings.file,
  recordings.history, tui.session, tui.settings, tui.views.frame.
A new choice of what to compare goes into the chooser.
"""
