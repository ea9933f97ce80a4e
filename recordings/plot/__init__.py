"""Figures of a recording for a report; needs matplotlib (the `export` extra)."""
