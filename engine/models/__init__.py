"""Models and their weights: our own decoder, transformers' models, checkpoints, random weights;
what must be fetched or converted lies in the user's cache as a whole folder (`cached_folder.py`).

May import: kernels, kernels.cpu, kernels.dispatch, engine.protocol, engine.scheduling,
  engine.simulation, engine.text.
A model family that is a variant of Llama goes into `decoder.py` and `model_config.py`.
"""
