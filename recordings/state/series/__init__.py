"""What is derived of a session step by step: columns, latencies, lanes, events.

May import: engine.protocol, recordings.state.
A new series of figures, one a step, gets a file here.
"""
