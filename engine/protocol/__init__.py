"""What goes over the wire, and what everybody shares: telemetry messages and their rows, commands,
replies, and in `settings/` what can be set. Free of torch; imports nothing of ours.

May import: engine.protocol.settings.
A new message or field goes into `wire*.py`, a new command into `commands.py`, its answer into
`replies.py`, a new knob into `settings/knobs.py`. `native/` is the C that encodes rows; it has a
twin in Python beside its user.
"""
