"""Alert rules on the figures of a session, and the decision when a rule fires.

May import: recordings.attribution, recordings.figures, recordings.history, recordings.state,
  recordings.state.series.
A new figure of the present moment is an entry of `OF_NOW` in `rule.py`, measured in `judge.py`.
"""
