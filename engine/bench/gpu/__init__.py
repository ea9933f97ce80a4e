"""`stepscope bench gpu`: how well an engine uses a GPU, compared with what the GPU can do.

The benchmark has parts (a) to (j), listed in `parts`. `conduct` starts a worker process for each
job: some parts on one model. `measure` runs in the worker. `results` is the report, and `aims`
compares it with targets. `costs` computes the floors: the least bytes and operations of a step.

May import: engine.bench, engine.models, engine.protocol.settings.
To add a part, add an entry to `parts.py` and a module to `measure`.
"""
