"""Alert rules on the figures of a session, and when they fire.

May import: recordings.figures, recordings.history, recordings.state, recordings.state.series.
Rules may also name the figures that `rule.py` defines and `meter.py` measures.
"""
