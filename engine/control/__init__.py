"""Serves an engine's control socket on a thread of its own (the control thread).

The thread decodes, checks and answers commands. Does not import torch.

May import: engine.loop, engine.protocol, engine.telemetry, engine.text, engine.transport.
Put checks that need nothing from the engine's thread here, where they cost it no time.
"""
