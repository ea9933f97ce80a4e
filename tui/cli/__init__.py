"""The `stepscope` command: its entry point, and how every command ends.

May import: tui.cli.dashboards, tui.cli.shared, tui.cli.table, tui.settings.
Options go into `table`, what a command does into the room of its kind.
"""
