"""One file for each experiment: its arms as data, and the function that judges their runs.

May import: engine.protocol.settings, tui.cli.lab.
`stepscope lab` lists every file here that has an `EXPERIMENT`.
"""
