"""The `stepscope` command: its entry point, and how every command ends.

May import: tui.cli.dashboards, tui.cli.shared, tui.settings, tui.views.
Any function of a command may raise the errors of `tui.settings.cli_errors` and those that
`shared/process.py` knows: they end it with one line.
A command is a module in the package of its kind, such as `engines` or `recordings`, with its
options beside its body; `command_line.py` names it.
"""
