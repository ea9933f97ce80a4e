"""Models and their weights: our own decoder, transformers' models, checkpoints, random weights.

May import: kernels, kernels.cpu, kernels.dispatch, engine.models.cache,
  engine.protocol.settings, engine.scheduling, engine.simulation, engine.text.
A model family that is a variant of Llama goes into `decoder.py` and `model_config.py`.
"""
