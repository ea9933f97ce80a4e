"""The MCAP container: chunks, indexes and records as they lie in a file.

May import: engine.protocol.
What another program must agree with goes here.
"""
