"""Defines an experiment: a claim and its source, the runs to make (arms), and how to judge them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stepscope.engine.protocol.wire import KnobValue
from stepscope.tui.cli.lab.arm_run import ArmRun


class Work(NamedTuple):
    """A request `at_s` seconds after an arm begins, of random tokens, the first of them shared."""

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
    """One run of the engine, with these knobs (that differ from `bench.BASE`) and requests."""

    name: str
    knobs: Mapping[str, KnobValue]
    work: tuple[Work, ...]
    changes: tuple[ArmChange, ...] = ()
    is_warm: bool = False  # the prefix cache keeps its blocks from the previous arm
    is_apart: bool = False  # on a prefill and a decode engine, with half of the cores each


class ArmFigure(NamedTuple):
    """A column in the table of the report; `of` returns a value for each row."""

    name: str
    of: Callable[[Sequence[ArmRun]], Sequence[float]]
    form: str = ",.0f"
    is_drawn: bool = False  # the picture of the experiment shows it too


class LabFinding(NamedTuple):
    """The result of an experiment. A judge leaves out the rows."""

    holds: bool | None  # whether the claim was reproduced; None if it cannot be tried here
    measured: str  # in one sentence
    why: str  # it was not reproduced, or what is missing to try it; else empty
    marked: tuple[str, str] | None = None  # an arm to mark in the picture, and the text there
    rows: tuple[tuple[str, *tuple[float, ...]], ...] = ()  # an arm, and a value for each column

    @property
    def verdict(self) -> str:
        named = {True: "reproduced", False: "not here", None: "cannot be tried here"}
        return named[self.holds]

    @property
    def text(self) -> str:
        return self.verdict + (f": {self.why}" if self.why else "")


class Experiment(NamedTuple):
    """A claim, and how to try it."""

    name: str
    claim: str
    source: str
    differ: str  # what the arms differ in, such as "budget": heading of the table's first column
    arms: tuple[Arm, ...]
    columns: tuple[ArmFigure, ...]
    # Gets the runs of all arms in their order, and the values of each column by its name.
    judge: Callable[[Sequence[ArmRun], Mapping[str, Sequence[float]]], LabFinding]
    rows: tuple[str, ...] = ()  # names of the table's rows, if they are not the arms

    def finding(self, runs: Sequence[ArmRun]) -> LabFinding:
        """Return what the runs of all arms say of the claim."""
        columns = {each.name: each.of(runs) for each in self.columns}
        found = self.judge(runs, columns)
        rows = zip(self.rows or [run.name for run in runs], *columns.values(), strict=False)
        return found._replace(why="" if found.holds else found.why, rows=tuple(rows))

    def table(self, finding: LabFinding) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the table of arms as text: (heading, rows)."""
        rows = [
            (name, *(format(v, c.form) for v, c in zip(values, self.columns, strict=True)))
            for name, *values in finding.rows
        ]
        return (self.differ, *(each.name for each in self.columns)), rows
