"""Incidents: when an alert rule fires, the steps around it are kept in a file.

May import: recordings, recordings.alerts, recordings.attribution, recordings.check,
  recordings.figures, recordings.file, recordings.history, recordings.state.
The metadata of such a file are in `recordings/file/incident.py`.
"""
