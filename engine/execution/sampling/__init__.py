"""Samples tokens from logits, on the host and on a device.

May import: kernels, engine.execution.machine, engine.protocol, engine.protocol.settings,
  engine.scheduling.
Add a new way of sampling to both `host_sampling.py` and its twin `device_sampling.py`.
"""
