"""Formats the tables that commands print."""

from collections.abc import Sequence


def text_table(heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return lines with aligned columns; `sides` has < (left) or > (right) for each column."""
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(len(heading))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in [heading, *rows]
    ]
