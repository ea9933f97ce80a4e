"""A session as a table with one row for each step: sums over any part of it, its index, fits.

May import: engine.protocol, engine.simulation, recordings.state.
A new number of each step is a field of `StepSummary` in `steps.py`, a new sum one of `Sums`.
"""
