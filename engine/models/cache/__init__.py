"""Checkpoints that are fetched or converted once, into the user's cache, never in part.

May import: engine.protocol.settings.
A new source of weights that must be fetched or converted goes here.
"""
