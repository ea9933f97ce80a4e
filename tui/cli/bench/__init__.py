"""Commands that measure an engine on this machine.

May import: engine.bench, engine.execution.machine, engine.protocol, engine.protocol.settings,
  tui.cli.engines, tui.cli.shared, tui.settings, tui.views.
`engine.bench` does the measuring.
"""
