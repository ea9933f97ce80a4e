"""Alert rules on the figures of a session, the decision when one fires, and incidents: the steps
around it, kept in a file.

May import: recordings, recordings.attribution, recordings.check, recordings.file,
  recordings.history, recordings.state.
A new figure of the present moment is an entry of `OF_NOW` in `rule.py`, measured in `judge.py`. The
metadata of an incident's file are in `recordings/file/incident.py`.
"""
