"""Runs steps on a device: the runner, its inputs, CUDA graphs, the sampler, and the preparation
before the first step.

May import: kernels, kernels.dispatch, kernels.triton, engine.models, engine.protocol,
  engine.scheduling, engine.text.
Code that a step needs on the device goes here, and code that depends on the machine. Add a new way
of sampling both to `host_sampling.py` and to `sampler.py`, which give the same tokens.
"""
