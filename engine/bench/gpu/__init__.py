"""`stepscope bench gpu`: how well an engine uses a GPU, compared with what the GPU can do.

`parts` lists the parts of the benchmark. `conduct` starts a worker process for each model, in which
`measure` runs. `results` is the report, `aims` judges it, and `costs` computes the lower bounds on
bytes and operations (the floors).

May import: engine.bench, engine.models, engine.protocol.settings.
To add a part, add an entry to `parts.py` and a module to `measure`.
"""
