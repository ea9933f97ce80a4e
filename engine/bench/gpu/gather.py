"""`Gatherer`: adds the messages of a worker process to the report."""

import time
from collections.abc import Callable

import msgspec

from stepscope.engine.bench.gpu.parts import (
    PARTS,
    Begun,
    BenchJob,
    Doing,
    Ended,
    Failed,
    Found,
    Hello,
)
from stepscope.engine.bench.gpu.results import BenchPoint, PartOutcome, Report


class Gatherer:
    """Adds the results of one job to the report.

    Args:
        show: called with the title of the current part, and with what the part measures now.
    """

    def __init__(
        self,
        job: BenchJob,
        report: Report,
        show: Callable[[str, str], None] = lambda what, detail: None,
    ) -> None:
        self._job = job
        self._report = report
        self._show = show
        self._outcome: PartOutcome | None = None  # of the part in progress
        self._begun_s = 0.0
        self._ended: set[str] = set()
        self._why = ""

    def take(self, message: Hello | Doing | Begun | Found | Ended | Failed) -> None:
        report, outcome = self._report, self._outcome
        if isinstance(message, Hello):
            report.device, report.is_gpu = message.device, message.is_gpu
            report.versions.update(message.versions)
        elif isinstance(message, Doing):
            self._show(self._title(message.part), message.detail)
        elif isinstance(message, Begun):
            self._outcome = self._found_outcome(message.part)
            self._begun_s = time.monotonic()
            self._show(self._title(message.part), "")
        elif isinstance(message, Failed):
            self._why = message.why
        elif outcome is None:
            return
        elif isinstance(message, Found):
            outcome.points.append(msgspec.convert(message.point, BenchPoint, from_attributes=True))
        else:
            outcome.seconds += message.seconds
            outcome.why = outcome.why or message.why
            outcome.settings.update(message.settings)
            self._ended.add(outcome.part)
            self._outcome = None

    def end(self, why: str) -> None:
        """Finish the job. Gives a reason for every part that was not measured, or not completely.

        Args:
            why: why the process ended early. Empty if it ended normally.
        """
        if self._outcome is not None:
            self._outcome.seconds += time.monotonic() - self._begun_s
        for part in self._job.parts:
            if part not in self._ended:
                outcome = self._found_outcome(part)
                reason = self._why or why or "its process ended without giving a reason"
                outcome.why = outcome.why or reason

    def _found_outcome(self, part: str) -> PartOutcome:
        """Return the outcome of a part in the report. Adds one if there is none.

        In part (g), the jobs of transformers and of stepscope share one outcome.
        """
        found = self._report.outcome(part, self._job.model)
        if found is None:
            found = PartOutcome(part=part, model=self._job.model)
            self._report.outcomes.append(found)
        return found

    def _title(self, part: str) -> str:
        on = f", {self._job.model}" if self._job.model else ""
        return f"({part}) {PARTS[part].name}{on}" if part in PARTS else f"starting{on}"
