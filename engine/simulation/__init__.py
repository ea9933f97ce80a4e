"""Engines without a model: made-up tokens and modelled step times, on a virtual clock, or the
scheduler alone (`dry_run`). Needs no torch.

May import: engine.loop, engine.protocol, engine.scheduling, engine.text, engine.workload.
A new model of step times gets a file here, and so does a new way to run simulated engines.
"""
