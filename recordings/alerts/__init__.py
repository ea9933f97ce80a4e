"""Rules about a session, and when they fire.

May import: recordings.figures, recordings.history, recordings.state, recordings.state.series.
What a rule may name besides `recordings.figures` is in `rule.py`, and measured in `meter.py`.
"""
