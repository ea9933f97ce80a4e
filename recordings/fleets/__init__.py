"""Several engines side by side: their figures, and which one is out of step.

May import: engine.protocol, recordings.history, recordings.state, recordings.state.series.
What may stand out is a rule in `imbalance.py`.
"""
