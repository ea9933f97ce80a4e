"""One file for each experiment: its arms (runs of the engine) as data, and the judge of the runs.

May import: engine.protocol.settings, tui.cli.lab.
`stepscope lab` lists every file here that has an `EXPERIMENT`.
"""
