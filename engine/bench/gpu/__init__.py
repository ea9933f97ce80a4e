"""`stepscope bench gpu`: what an engine makes of a GPU, measured against what the GPU can do.

`conduct` starts a process for each model; `measure` runs in it. It tells what it finds line by
line; `results` is the report, `aims` judges it, `costs` has the floors. `parts` lists what there is.

May import: engine.bench, engine.execution.machine, engine.models, engine.protocol.
A new part gets its entry in `parts.py` and a module in `measure`.
"""
