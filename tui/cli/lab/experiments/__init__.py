"""One file an experiment: its arms as data, and the function that judges what was recorded.

May import: engine.protocol.settings, tui.cli.lab.
A file here that has an `EXPERIMENT` is in the list of `stepscope lab`.
"""
