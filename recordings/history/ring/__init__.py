"""The messages of a session in memory: a ring of compressed segments that drops the oldest.

May import: engine.protocol, recordings.packing, recordings.state.
Code that saves memory for many steps goes here.
"""
