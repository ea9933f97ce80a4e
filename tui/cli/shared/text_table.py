"""Formats the tables that commands print."""

from collections.abc import Sequence


def text_table(heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return a table as lines of text with aligned columns.

    Args:
        sides: for each column < (left) or > (right).
    """
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(len(heading))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in [heading, *rows]
    ]
