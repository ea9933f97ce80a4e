"""Watches several engines side by side: their figures, and which engine stands out.

May import: engine.protocol, recordings.history, recordings.session, recordings.state.
A new way to stand out is a rule in `imbalance.py`.
"""
