"""The options of `stepscope bench` and `stepscope lab`.

May import: tui.cli.bench, tui.cli.lab, tui.cli.shared.
What the commands do is in the packages `bench` and `lab`.
"""
