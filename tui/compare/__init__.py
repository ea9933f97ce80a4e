"""The compare screen, its chooser, and the same words and figures for `stepscope compare`."""
