"""`PendingStep`: a step that was scheduled and whose record is not published yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stepscope.engine.protocol.wire import Phase, RequestEvent
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.step import (
    InFlight,
    Runner,
    ScheduledRow,
    ScheduledStep,
    StepResult,
)
from stepscope.engine.telemetry.step_draft import PlannedBlocks, StepDraft


class Unlaunched:
    """The handle of a step that was not launched: it runs when its result is collected."""

    is_whole = True

    def __init__(self, runner: Runner, step: ScheduledStep) -> None:
        self._runner = runner
        self._step = step

    def collect(self) -> StepResult:
        return self._runner.execute(self._step)


class FailedLaunch:
    """The handle of a step whose launch failed: collecting its result raises the error."""

    is_whole = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def collect(self) -> StepResult:
        raise self._error


@dataclass(slots=True)
class PendingStep:
    """A step that was scheduled and has not ended. Belongs to the engine's thread."""

    number: int
    # Its rows, without those of requests that have ended since; the same as in `draft`.
    rows: list[ScheduledRow]
    handle: InFlight
    # When its launch was complete, if the step before it still ran then; else None.
    launched_ns: int | None
    draft: StepDraft | None
    scheduled: ScheduledStep  # the step as the runner got it
    # Its changes of KV blocks, if it was scheduled while another step ran; else None.
    planned: PlannedBlocks | None = None
    # What happened to requests up to and during its scheduling, not yet published.
    events: list[RequestEvent] = field(default_factory=list)
    num_wasted_tokens: int = 0  # tokens of the rows that were dropped
    num_draft_tokens: int = 0  # guessed tokens in the rows, as scheduled
    tokens_before_ns: int = 0  # when the tokens of the step before it were known; set by `execute`
    _kept: list[int] | None = None  # index at the launch of each row that is left; None: all

    def drop_ended(self) -> None:
        """Drop the rows of requests that have ended, or lost their blocks, since the launch."""
        kept = [i for i, row in enumerate(self.rows) if row.request.status is RequestStatus.RUNNING]
        if len(kept) == len(self.rows):
            return
        rows = self.rows
        ended = [row for row in rows if row.request.status is not RequestStatus.RUNNING]
        num_tokens = sum(row.num_tokens for row in ended)
        self.num_wasted_tokens += num_tokens
        if self.draft is not None:
            num_decode = sum(row.num_tokens for row in ended if row.phase is Phase.DECODE)
            self.draft.drop_rows(kept, num_tokens - num_decode, num_decode)
        self.rows = [rows[i] for i in kept]
        before = self._kept
        self._kept = kept if before is None else [before[i] for i in kept]

    def launched(self, indices: Sequence[int]) -> list[ScheduledRow]:
        """Return the rows that had these indices at the launch, without those dropped since."""
        places = range(len(self.rows)) if self._kept is None else self._kept
        left = dict(zip(places, self.rows, strict=True))
        return [left[index] for index in indices if index in left]

    def result_of(self, result: StepResult) -> StepResult:
        """Return `result` without the rows dropped since the launch."""
        kept = self._kept
        if kept is None:
            return result
        logprobs, bursts = result.logprobs or {}, result.bursts or {}
        return replace(
            result,
            token_ids=[result.token_ids[i] for i in kept],
            logprobs={place: logprobs[i] for place, i in enumerate(kept) if i in logprobs},
            bursts={place: bursts[i] for place, i in enumerate(kept) if i in bursts},
        )

    def requests(self) -> list[Request]:
        return [row.request for row in self.rows]
