"""Runs a step on a device: the runner, its inputs, graphs, and what a device does before its first
step.

May import: kernels, kernels.dispatch, kernels.triton, engine.execution.machine,
  engine.execution.sampling, engine.models, engine.models.cache, engine.protocol,
  engine.protocol.settings, engine.scheduling, engine.text.
What a step needs on the device goes here; choosing tokens is in `sampling`.
"""
