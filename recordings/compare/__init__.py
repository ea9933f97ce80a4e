"""Two runs held against each other: their bounded reductions, figures, and what chance would do."""
