"""Series that are derived from a session step by step: columns, latencies, lanes, events.

May import: engine.protocol, recordings.state.
A new series with one figure per step gets a file here.
"""
