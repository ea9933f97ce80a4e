"""Runs steps on a device: the runner, its inputs, CUDA graphs, and the preparation before the first
step.

May import: kernels, kernels.dispatch, kernels.triton, engine.execution.machine,
  engine.execution.sampling, engine.models, engine.models.cache, engine.protocol,
  engine.protocol.settings, engine.scheduling, engine.text.
Code that a step needs on the device goes here. Choosing tokens is in `sampling`.
"""
