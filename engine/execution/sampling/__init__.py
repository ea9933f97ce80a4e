"""Samples tokens from logits, on the host and on a device.

May import: kernels, engine.execution.machine, engine.protocol, engine.protocol.settings,
  engine.scheduling.
Add a new way of sampling both to `host_sampling.py` and to the functions for a device in
`sampler.py`, which give the same tokens.
"""
