"""The commands of `stepscope`: names, options and help, in a file for each kind of command.

May import: tui.cli.bench, tui.cli.dashboards, tui.cli.engines, tui.cli.lab, tui.cli.recordings,
  tui.cli.shared, tui.cli.simulation, tui.settings.
A new command gets its options here. When called, it imports the module that does the work.
"""
