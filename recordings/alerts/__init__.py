"""Alert rules on the metrics of a session, and the decision when a rule fires.

May import: recordings.figures, recordings.history, recordings.state, recordings.state.series.
Rules may also name the metrics that `rule.py` defines and `meter.py` measures.
"""
