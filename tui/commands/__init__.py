"""What each command of `stepscope` does; its name, options and help are in `command_table`."""
