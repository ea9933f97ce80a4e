"""Defines an experiment: a claim and its source, the runs to make (arms), and how to judge them."""

import importlib
import pkgutil
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
    """A figure of each arm: a column in the table of the report.

    Attributes:
        is_drawn: whether the picture of the experiment shows it too.
    """

    name: str
    form: str = ",.0f"
    is_drawn: bool = False


class LabFinding(NamedTuple):
    """The result of an experiment.

    Attributes:
        measured: what was measured, in one sentence.
        why: why the claim was not reproduced, or what is missing to try it; else empty.
        arms: heading of the table's first column: what the arms differ in, such as "budget".
        rows: for each arm its name, and a value for each of `columns`.
        marked: (name of an arm to mark in the picture, text of the mark).
    """

    verdict: Verdict
    measured: str
    why: str = ""
    arms: str = ""
    columns: tuple[ArmFigure, ...] = ()
    rows: tuple[tuple[str, *tuple[float, ...]], ...] = ()
    marked: tuple[str, str] | None = None

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the table of arms as text: (heading, rows)."""
        rows = [
            (name, *(format(v, c.form) for v, c in zip(values, self.columns, strict=True)))
            for name, *values in self.rows
        ]
        return (self.arms, *(each.name for each in self.columns)), rows


class Experiment(NamedTuple):
    """A claim, and how to try it.

    Attributes:
        judge: makes the finding from the runs of all arms, in their order.
    """

    number: int  # its position in the list
    name: str
    claim: str
    source: str
    arms: tuple[Arm, ...]
    judge: Callable[[Sequence[ArmRun]], LabFinding]


def all_experiments() -> list[Experiment]:
    """Return the experiments of all files in `experiments`, by number."""
    package = importlib.import_module("stepscope.tui.cli.lab.experiments")
    modules = (
        importlib.import_module(f"{package.__name__}.{each.name}")
        for each in pkgutil.iter_modules(package.__path__)
    )
    found = [each.EXPERIMENT for each in modules if hasattr(each, "EXPERIMENT")]
    return sorted(found, key=lambda each: each.number)
