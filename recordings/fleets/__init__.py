"""Several engines looked at together, and which of them stands out."""
