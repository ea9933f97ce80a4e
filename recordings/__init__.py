"""Sessions without a screen: receive, reduce, keep, write, read and replay what engines publish.

May import: nothing of ours.
A new thing goes into the room that owns its noun; here is only what all rooms may raise.
"""
