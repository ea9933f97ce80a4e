"""The messages of a session in memory, in compressed segments, and a fast way to apply them.

May import: engine.protocol, recordings.packing, recordings.state, recordings.state.series.
Code that saves memory or time for many steps at once goes here.
"""
