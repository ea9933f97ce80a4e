"""Formats the tables that commands print, and the times in them."""

from collections.abc import Sequence

from stepscope.tui.views import format as fmt


def text_table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str | None = None
) -> list[str]:
    """Return a table as lines of text with aligned columns.

    Args:
        sides: for each column < (left) or > (right); by default only the first one is left.
    """
    sides = sides or "<" + ">" * (len(heading) - 1)
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in [heading, *rows]
    ]


def ms(ns: float | None) -> str:
    """Return 1,234.5 ms; a dash if it is unknown."""
    return "—" if ns is None else f"{ns / 1e6:,.1f} ms"


def in_ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def clock_ms(wall_ns: int | None) -> str:
    """Return a time of day with its milliseconds; a dash if it is unknown."""
    return "—" if wall_ns is None else f"{fmt.clock(wall_ns)}.{wall_ns // 1_000_000 % 1000:03d}"
