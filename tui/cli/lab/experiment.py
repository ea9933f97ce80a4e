"""Defines an experiment: a claim and its source, the runs to make (arms), and how to judge them.

An arm is one run of the engine with certain knobs; `ArmRun` is its recording.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stepscope.engine.protocol.wire import BatchRow, KnobValue, Phase, StepRecord
from stepscope.recordings.attribution.causes import CAUSES
from stepscope.recordings.compare.comparison import Comparison, compare
from stepscope.recordings.compare.side.recording_feed import RecordingFeed
from stepscope.recordings.compare.side.requests import RequestRun
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.simulation.fitting import step_records
from stepscope.recordings.state.series.latency import SLO

LEVELS = SLO(ttft_ms=1500.0, itl_ms=150.0)


class Refused(NamedTuple):
    """A request that the engine refused, and why."""

    name: str
    message: str


class ArmRun:
    """The recorded run of an arm, its `outputs` by request, and that of a `decoding` engine."""

    def __init__(
        self,
        name: str,
        path: Path,
        outputs: Mapping[str, Sequence[int]],
        refused: Sequence[Refused],
        decoding: "ArmRun | None" = None,
    ) -> None:
        self.name = name
        self.path = path
        self.outputs = outputs
        self.refused = refused
        self.decoding = self if decoding is None else decoding

    @cached_property
    def side(self) -> Side:
        """The whole recording, read as one of the runs that `stepscope compare` compares."""
        feed = RecordingFeed(Recording(self.path), self.name, LEVELS, StepRange())
        while not feed.is_done:
            feed.read(time.monotonic() + 1.0)
        assert feed.side is not None
        return feed.side

    @cached_property
    def steps(self) -> list[StepRecord]:
        """Every step of the run."""
        with Recording(self.path) as recording:
            return list(step_records(recording))

    def against(self, other: "ArmRun") -> Comparison:
        """Compare this run, as run A, with another as run B."""
        return compare(self.side, other.side)

    def value(self, key: str) -> float:
        """Return a figure of this run by its name in `stepscope compare`; NaN without a value."""
        value = compare(self.side, self.side).figure(key).a
        return float("nan") if value is None else value

    def requests(self, prefix: str) -> list[RequestRun]:
        """Return the requests whose names begin with `prefix`."""
        runs = self.side.requests.values()
        return [each for each in runs if each.client_id.startswith(prefix)]

    def ttft_ms(self, prefix: str) -> float:
        """The median TTFT of the requests whose names begin with `prefix`; NaN without any."""
        runs = self.requests(prefix)
        known = sorted(each.ttft_ns for each in runs if each.ttft_ns is not None)
        return known[len(known) // 2] / 1e6 if known else float("nan")

    def rows_of(self, name: str) -> Iterator[tuple[StepRecord, BatchRow]]:
        """Yield each step that computed a request, with the request's row in the batch."""
        [request] = self.requests(name)
        for step in self.steps:
            for row in step.batch or ():
                if row.request_id == request.request_id:
                    yield step, row

    def num_prefill_steps(self, name: str) -> int:
        """Number of steps that computed a part of this request's prompt."""
        return sum(row.phase != Phase.DECODE for _, row in self.rows_of(name))

    def tokens_per_s(self, wanted: Callable[[StepRecord], bool]) -> float:
        """Return the tokens computed per second of step time, in the steps that are `wanted`."""
        steps = [each for each in self.steps if wanted(each)]
        num_tokens = sum(each.num_prefill_tokens + each.num_decode_tokens for each in steps)
        return num_tokens / max(1e-9, sum(map(seconds, steps)))

    @property
    def tokens_out_per_s(self) -> float:
        """Output tokens per second of all clients, from the first arrival to the last token."""
        begin_ns = min(each.arrival_ns for each in self.side.requests.values())
        end_ns = max(run.steps[-1].tokens_ns for run in {self, self.decoding})
        return sum(map(len, self.outputs.values())) / ((end_ns - begin_ns) / 1e9)

    def main_cause(self) -> str:
        """Say which cause delayed late tokens the most, named as in `stepscope explain`."""
        causes = self.against(self).causes
        if not causes:
            return "no token was late"
        worst = max(causes, key=lambda each: (each.a_ns, -CAUSES.index(each.cause)))
        return f"late tokens waited most for: {worst.cause} ({worst.a_ns / 1e9:.1f} s)"


def seconds(step: StepRecord) -> float:
    return (step.tokens_ns - step.schedule_start_ns) / 1e9


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
