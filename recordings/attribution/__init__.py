"""Why a token was late: waits, their causes, the baseline of step times, and whole files.

May import: engine.protocol, recordings, recordings.file, recordings.state,
  recordings.state.series.
A new cause is defined in `causes.py` and detected in `open_waits.py`.
"""
