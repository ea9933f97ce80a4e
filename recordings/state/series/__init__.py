"""Data derived from a session step by step: columns of numbers, latencies, lanes, log events.

A lane is the row of a chart that shows what one request did in each step.

May import: engine.protocol, recordings.state.
A new series with one number per step gets a file here.
"""
