"""Compares two runs, A and B: figures, load, settings, and which run is better in each figure.

A `Side` is one of the two runs, read message by message in bounded memory; feeds read it from a
file or from memory.

May import: engine.protocol, recordings, recordings.attribution, recordings.file,
  recordings.history, recordings.session, recordings.state.
A new figure goes into `figures.py`, its sum into `session/sums.py` and `totals.py`; what is
known of each request goes into `side_requests.py`.
"""
