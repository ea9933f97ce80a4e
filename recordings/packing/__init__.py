"""Packed steps: a compact form of step records, for files and memory.

May import: engine.protocol.
A new way to pack a message goes here, with its unpacking beside it.
"""
