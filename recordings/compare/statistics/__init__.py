"""Tests whether a difference between two runs may be chance. Pure functions.

May import: recordings.compare.side.
The code here must not depend on engines or files.
"""
