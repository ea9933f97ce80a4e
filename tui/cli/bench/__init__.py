"""Commands that measure an engine on this machine.

May import: engine.bench, engine.bench.gpu, engine.execution.machine, engine.protocol,
  engine.protocol.settings, tui.cli.engines, tui.cli.shared, tui.settings, tui.views.
One module for each command; `engine.bench` does the measuring.
"""
