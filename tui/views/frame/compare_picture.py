"""`ComparePage`: two runs as they are to be drawn, taken at one moment."""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.requests import Pair
from stepscope.tui.views.frame.compare_choices import CompareChoice

SideName: TypeAlias = Literal["a", "b"]


class ComparePage(NamedTuple):
    """The comparison as it is to be drawn.

    Attributes:
        comparison: None while nothing of one side is read yet, or nothing is chosen.
        choices: what there is to compare with, while the operator chooses.
        shares: of each side, how much of it is read; None for one that goes on.
        columns: of both charts, from left to right; None where a side has no step.
        start, width: offset of the first column, and what a column stands for.
        cursor: offset looked at; `points` are what both sides did there.
        selected: place among `comparison.requests.pairs`.
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
