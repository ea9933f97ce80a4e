"""What can be set: an engine's configuration, its knobs, how a request is sampled, a workload.

May import: engine.protocol.
A new knob goes into `knobs.py`; options, bounds and editor follow.
"""
