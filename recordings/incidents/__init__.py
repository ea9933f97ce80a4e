"""Incidents: what happened around a rule that fired, kept in a file of its own.

May import: engine.protocol, recordings, recordings.alerts, recordings.attribution,
  recordings.check, recordings.figures, recordings.file, recordings.history, recordings.state.
What a file says of its incident is in `incident.py`.
"""
