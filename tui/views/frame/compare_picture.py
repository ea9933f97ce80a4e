"""`ComparePage`: the data that the page with a comparison of two runs is drawn from."""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import Comparison
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.requests import Pair
from stepscope.tui.views.frame.compare_choices import CompareChoice

SideName: TypeAlias = Literal["a", "b"]


class ComparePage(NamedTuple):
    """The data of the comparison page, taken at one moment. Pairs hold run A, then run B.

    Attributes:
        comparison: the result so far; None until some of each run has been read, and while the
            operator has chosen nothing.
        choices: what to compare with, while the operator chooses; else None.
        shares: the share of each run that has been read; None for a run that still grows.
        columns: the columns of the charts of A and B, from left to right; None where a run has no
            step.
        start: the offset of the first column on the common axis.
        width: the extent of one column on that axis.
        cursor: the offset of the cursor.
        points: what each run did at the cursor.
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
