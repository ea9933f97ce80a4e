"""Reads logs and results of other tools into recordings: one file a format.

May import: engine.protocol, recordings, recordings.live, recordings.simulation.
A new format goes here: a function that recognises its file, and its line in `imported.FORMATS`.
"""
