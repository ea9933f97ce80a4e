"""Commands that measure an engine on this machine.

May import: engine.bench, engine.bench.gpu, engine.execution.machine, engine.protocol,
  engine.protocol.settings, tui.cli.engines, tui.cli.shared, tui.settings, tui.views.
One module a command; what is measured is in `engine.bench`.
"""
