"""Tests whether a difference between two runs may be chance. Pure functions.

May import: recordings.compare.side.
Nothing here knows of engines or files.
"""
