"""What can be typed after `stepscope`: names, options and help, a file for each kind of command.

Nothing heavy is imported here: a command imports the module that does its work when it runs.
"""
