"""`ComparePage`: the data to draw a comparison of two runs, taken at one moment."""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.requests import Pair
from stepscope.tui.views.frame.compare_choices import CompareChoice

SideName: TypeAlias = Literal["a", "b"]


class ComparePage(NamedTuple):
    """The data to draw a comparison.

    Attributes:
        comparison: None until some of each side has been read, or while nothing is chosen.
        choices: what to compare with, while the operator chooses; else None.
        shares: the share of each side that has been read; None for a side that still grows.
        columns: the columns of both charts, from left to right; None where a side has no step.
        start, width: the offset of the first column, and the extent of one column.
        cursor: the offset of the cursor; `points` are what both sides did there.
        selected: index into `comparison.requests.pairs`, or into `choices`.
    """

    names: tuple[str, str]
    comparison: Comparison | None
    choices: list[CompareChoice] | None
    is_reading: bool
    was_cancelled: bool
    shares: tuple[float | None, float | None]
    notes: list[str]
    align: Align
    focus: SideName
    columns: tuple[list[StepPoint | None], list[StepPoint | None]]
    start: int
    width: int
    cursor: int
    cursor_column: int
    points: tuple[StepPoint | None, StepPoint | None]
    selected: int
    pair: Pair | None
