"""Sessions without a screen: receive, reduce, keep, write, read and replay what engines publish."""
