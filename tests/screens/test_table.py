"""Drawing a table of thousands of rows builds no more rows than one that fits."""

import pytest

from stepscope.tui.views.framed_panels import Cell, Column, Rows, table

COLUMNS = (Column("step", 6, True), Column("what", 0))


@pytest.mark.parametrize(
    ("selected", "first_row", "first"), [(None, 0, 0), (None, 4_000, 4_000), (2_500, 0, 2_496)]
)
def test_only_visible_rows_of_a_long_list_are_built(
    selected: int | None, first_row: int, first: int
) -> None:
    made: list[int] = []

    def row(at: int) -> list[Cell]:
        made.append(at)
        return [(f"{at}", "text"), ("a change", "text")]

    lines = table(COLUMNS, Rows(5_000, row), 40, 10, selected, 7, first_row)
    assert made == list(range(first, first + 9))
    every = [[(f"{at}", "text"), ("a change", "text")] for at in range(5_000)]
    assert lines == table(COLUMNS, every, 40, 10, selected, 7, first_row)
