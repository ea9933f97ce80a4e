"""The messages on the wire (telemetry and its rows, commands and their replies), and what a user
can set: knobs, the engine's configuration, sampling, workloads. Every other package may import this
one. It needs no torch.

May import: nothing of ours.
A new message or field goes into `wire*.py`, a new command into `commands.py`, its answer into
`replies.py`, a new knob into `knobs.py`. `native/` is the C code that encodes rows; a
Python version of it lies beside the code that uses it.
"""
