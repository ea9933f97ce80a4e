"""Engines without a model: made-up tokens and a modelled clock, or the scheduler alone (`dry_run`).
Free of torch.

May import: engine.loop, engine.protocol, engine.protocol.settings, engine.scheduling.
A model of how long steps take gets a file here.
"""
