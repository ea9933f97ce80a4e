"""`stepscope bench gpu`: what an engine makes of a GPU, measured against what the GPU can do.

`parts` lists what there is to measure. `conduct` starts a process for each model, in which
`measure` runs. `results` is the report, `aims` judges it, `costs` has the floors.

May import: engine.bench, engine.models, engine.protocol.settings.
A new part gets its entry in `parts.py` and a module in `measure`.
"""
