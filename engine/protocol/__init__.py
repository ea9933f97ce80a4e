"""What goes over the wire, and what everybody shares: telemetry messages and their rows, commands,
knobs and limits, sampling parameters, the workload spec. Free of torch; imports nothing of ours.

May import: nothing of ours.
A new message or field goes into `wire*.py`, a new command into `commands.py`, a new knob into
`config.py`. `native/` is the C that encodes rows; it has a twin in Python beside its user.
"""
