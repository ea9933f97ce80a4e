"""Chooses tokens from logits, on the host and on a device.

May import: kernels, engine.execution.machine, engine.protocol, engine.protocol.settings,
  engine.scheduling.
A new way of sampling goes into `host_sampling.py` and its twin `device_sampling.py`.
"""
