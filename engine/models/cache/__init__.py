"""Fetches or converts checkpoints once, and puts each into the user's cache as a whole folder.

May import: engine.protocol.settings.
A new source of weights that must be fetched or converted goes here.
"""
