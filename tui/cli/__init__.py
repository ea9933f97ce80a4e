"""The `stepscope` command: its entry point, and how every command ends.

May import: tui.cli.dashboards, tui.cli.shared, tui.cli.table, tui.settings.
Options of a command go into the package `table`; what it does goes into the package of its kind,
such as `engines` or `recordings`.
"""
