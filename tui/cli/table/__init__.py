"""What can be typed after `stepscope`: names, options and help, a file for each kind of command.

May import: tui.cli.bench, tui.cli.dashboards, tui.cli.engines, tui.cli.lab, tui.cli.recordings,
  tui.cli.shared, tui.cli.simulation, tui.settings.
A new command gets its options here; imports of what it does stand inside its function.
"""
