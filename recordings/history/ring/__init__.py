"""The messages of a session in memory: a ring of compressed segments that drops the oldest.

Also here: a fast way to apply the steps of a file.

May import: engine.protocol, recordings.packing, recordings.state, recordings.state.series.
Code that saves memory or time for many steps at once goes here.
"""
