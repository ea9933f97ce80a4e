"""stepscope."""
