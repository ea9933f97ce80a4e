"""The engine process, and what every other process needs to talk to one.

May import: nothing of ours.
A new thing goes into the room that owns its noun; this folder holds rooms only.
"""
