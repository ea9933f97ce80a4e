"""Checkpoints that are fetched or converted once, into the user's cache: whole or not at all.

May import: engine.protocol.settings.
Another source of weights that has to be fetched or converted goes here.
"""
