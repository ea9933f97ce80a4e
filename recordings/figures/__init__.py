"""Every figure of a session by name: what it means, its unit, its value, and bounds on it.

May import: recordings.state.series.
A new figure gets a line in `table.py` and its sum in `sums.py`.
"""
