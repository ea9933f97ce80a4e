"""Engines without a model: made-up tokens and modelled step times, or the scheduler alone
(`dry_run`). Needs no torch.

May import: engine.protocol, engine.protocol.settings, engine.scheduling.
A new model of step times gets a file here.
"""
