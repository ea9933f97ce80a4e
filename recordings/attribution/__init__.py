"""Explains why a token was late: how long it was waited for, and what caused the wait.

A baseline (the usual duration of steps with as much work) tells which steps were slow.

May import: engine.protocol, recordings, recordings.file, recordings.session, recordings.state.
A new cause is defined in `causes.py` and detected in `open_waits.py`.
"""
