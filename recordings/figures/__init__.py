"""All figures of a session by name: meaning, unit and value, and bounds on them.

May import: recordings.session, recordings.state.
A new figure gets a line in `table.py` and its value in `sums.py`.
"""
