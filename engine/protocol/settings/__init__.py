"""What a user can set: an engine's configuration and knobs, sampling parameters, a workload.

May import: engine.protocol.
A new knob goes into `knobs.py`; its option, its bounds and its editor are made from its
definition there.
"""
