"""Defines an experiment: a claim and its source, the runs to make (arms), and how to judge them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import KnobValue
from stepscope.tui.cli.lab.arm_run import ArmRun

Verdict: TypeAlias = Literal["reproduced", "not here", "cannot be tried here"]


class Work(NamedTuple):
    """A request to send `at_s` seconds after an arm begins. Its prompt is random, from `seed`.

    The first `num_shared` tokens are drawn from seed 0 instead: requests share them as a prefix.
    """

    name: str
    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    num_shared: int = 0
    priority: int = 0


class ArmChange(NamedTuple):
    """A change of knobs, `at_s` seconds after an arm begins."""

    at_s: float
    knobs: Mapping[str, KnobValue]


class Arm(NamedTuple):
    """One run of the engine, with these knobs and these requests.

    Attributes:
        knobs: the knobs that differ from `bench.BASE`.
        work: the requests.
        is_warm: whether the prefix cache keeps its blocks from the previous arm.
        is_apart: whether to run on a prefill and a decode engine, with half of the cores each.
    """

    name: str
    knobs: Mapping[str, KnobValue]
    work: tuple[Work, ...]
    changes: tuple[ArmChange, ...] = ()
    is_warm: bool = False
    is_apart: bool = False


class ArmFigure(NamedTuple):
    """A column in the table of the report; `of` returns a value for each row."""

    name: str
    of: Callable[[Sequence[ArmRun]], Sequence[float]]
    form: str = ",.0f"
    is_drawn: bool = False


class ClaimJudgement(NamedTuple):
    """What a judge says of the runs of all arms.

    Attributes:
        holds: whether the claim was reproduced; None if it cannot be tried here.
        measured: what was measured, in one sentence.
        why: why the claim was not reproduced, or what is missing to try it.
        marked: (name of an arm to mark in the picture, text of the mark).
    """

    holds: bool | None
    measured: str
    why: str
    marked: tuple[str, str] | None = None


class LabFinding(NamedTuple):
    """The result of an experiment; a row has the name of an arm and a value for each column."""

    verdict: Verdict
    measured: str
    why: str = ""
    rows: tuple[tuple[str, *tuple[float, ...]], ...] = ()
    marked: tuple[str, str] | None = None


class Experiment(NamedTuple):
    """A claim, and how to try it.

    Attributes:
        differ: what the arms differ in, such as "budget": heading of the table's first column.
        judge: gets the runs of all arms in their order, and the values of each column by its name.
        rows: names of the table's rows, if they are not the arms.
    """

    name: str
    claim: str
    source: str
    differ: str
    arms: tuple[Arm, ...]
    columns: tuple[ArmFigure, ...]
    judge: Callable[[Sequence[ArmRun], Mapping[str, Sequence[float]]], ClaimJudgement]
    rows: tuple[str, ...] = ()

    def finding(self, runs: Sequence[ArmRun]) -> LabFinding:
        """Return what the runs of all arms say of the claim."""
        columns = {each.name: each.of(runs) for each in self.columns}
        holds, measured, why, marked = self.judge(runs, columns)
        verdict: Verdict = "reproduced" if holds else "not here"
        if holds is None:
            verdict = "cannot be tried here"
        rows = zip(self.rows or [run.name for run in runs], *columns.values(), strict=False)
        return LabFinding(verdict, measured, "" if holds else why, tuple(rows), marked)

    def table(self, finding: LabFinding) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the table of arms as text: (heading, rows)."""
        rows = [
            (name, *(format(v, c.form) for v, c in zip(values, self.columns, strict=True)))
            for name, *values in finding.rows
        ]
        return (self.differ, *(each.name for each in self.columns)), rows
