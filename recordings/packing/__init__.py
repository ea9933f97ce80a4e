"""Packed steps: the small form of steps in files and in memory.

May import: engine.protocol.
A new way to pack a message goes here, with its unpacking beside it.
"""
