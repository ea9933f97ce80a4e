"""Why a token was late: waits, their causes, what steps usually take, and whole files explained.

May import: engine.protocol, recordings, recordings.file, recordings.state,
  recordings.state.series.
A new cause goes into `causes.py` and is found in `waits.py`.
"""
