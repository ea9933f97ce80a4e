"""What an experiment is: a claim with its source, arms as data, and a judgement of their runs."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from stepscope.engine.protocol.wire import KnobValue
from stepscope.tui.cli.lab.arm_run import ArmRun

Verdict: TypeAlias = Literal["reproduced", "not here", "cannot be tried here"]


class Work(NamedTuple):
    """A request: its prompt is drawn from `seed` and begins with `num_shared` tokens of seed 0."""

    name: str
    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    num_shared: int = 0
    priority: int = 0


class ArmChange(NamedTuple):
    """A change of knobs while an arm runs."""

    at_s: float
    knobs: Mapping[str, KnobValue]


class Arm(NamedTuple):
    """The same engine with these knobs is given this work.

    Attributes:
        knobs: others than `bench.BASE`.
        is_warm: the prefix cache keeps what the arm before left in it.
        is_apart: on a prefill and a decode engine, with half of the cores each.
    """

    name: str
    knobs: Mapping[str, KnobValue]
    work: tuple[Work, ...]
    changes: tuple[ArmChange, ...] = ()
    is_warm: bool = False
    is_apart: bool = False


class ArmFigure(NamedTuple):
    """A figure of each arm; `is_drawn`: in the picture too."""

    name: str
    form: str = ",.0f"
    is_drawn: bool = False


class LabFinding(NamedTuple):
    """What was measured.

    Attributes:
        measured: in one sentence.
        why: of a claim that was not reproduced, where that comes from; or what is missing.
        arms: what the arms differ by: the name of the first column.
        rows: name of an arm, and a value for each of `columns`.
        marked: arm at which the picture has a mark, and what it says.
    """

    verdict: Verdict
    measured: str
    why: str = ""
    arms: str = ""
    columns: tuple[ArmFigure, ...] = ()
    rows: tuple[tuple[str, *tuple[float, ...]], ...] = ()
    marked: tuple[str, str] | None = None

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Its head and its rows, as text."""
        rows = [
            (name, *(format(v, c.form) for v, c in zip(values, self.columns, strict=True)))
            for name, *values in self.rows
        ]
        return (self.arms, *(each.name for each in self.columns)), rows


class Experiment(NamedTuple):
    """A claim, and how it is tried."""

    number: int  # place in the list
    name: str
    claim: str
    source: str
    arms: tuple[Arm, ...]
    judge: Callable[[Sequence[ArmRun]], LabFinding]


def all_experiments() -> list[Experiment]:
    """Of every file in `experiments`, in their order."""
    package = importlib.import_module("stepscope.tui.cli.lab.experiments")
    modules = (
        importlib.import_module(f"{package.__name__}.{each.name}")
        for each in pkgutil.iter_modules(package.__path__)
    )
    found = [each.EXPERIMENT for each in modules if hasattr(each, "EXPERIMENT")]
    return sorted(found, key=lambda each: each.number)
