"""`Pipeline`: schedules, launches and finishes steps; at most two are unfinished at a time.

Without overlap there is one step: it is scheduled, executed, updated and published. With overlap,
`schedule` also launches the next step before the tokens of the first have reached the host. While
the next step runs, the host updates and publishes the first, so the device does not wait for the
host (asynchronous scheduling, NanoFlow, Zhu et al., 2024). If the next step depends on the tokens
of the first, it is scheduled when they are known (`Scheduler.can_run_ahead`).

If a request turns out to have ended, its row in the next step is wasted, and the token sampled
there is thrown away. Its blocks are free at once: the request that gets them next writes to them in
a later step.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stepscope.engine.loop.client_requests import ClientRequests
from stepscope.engine.protocol.replies import UNSOUND_LOGITS
from stepscope.engine.protocol.wire import Phase, RequestEvent
from stepscope.engine.scheduling.acceptance import take_bursts
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import (
    DeviceLostError,
    DeviceMemoryError,
    InFlight,
    Runner,
    ScheduledRow,
    ScheduledStep,
    StepResult,
)
from stepscope.engine.telemetry.batch_rows import BatchRows
from stepscope.engine.telemetry.step_draft import PlannedBlocks, StepDraft
from stepscope.engine.telemetry.step_watcher import RunningRow, StepUnderWay

log = logging.getLogger("stepscope.engine")

# So many steps stay small after one did not fit into device memory. Then larger ones are tried
# again, because memory that another program took may be free.
SMALL_STEPS = 4096


class Unlaunched(NamedTuple):
    """The handle of a step that was not launched: collecting its result runs it, or raises."""

    runner: Runner
    step: ScheduledStep
    error: Exception | None = None  # of its launch

    def collect(self) -> StepResult:
        if self.error is not None:
            raise self.error
        return self.runner.execute(self.step)


@dataclass(slots=True)
class PendingStep:
    """A step that was scheduled and has not ended. Belongs to the engine's thread."""

    scheduled: ScheduledStep  # the step as the runner got it
    # Its rows, without those of requests that have ended since; the same as in `draft`.
    rows: list[ScheduledRow]
    handle: InFlight
    # When its launch was complete, if the step before it still ran then; else None.
    launched_ns: int | None
    draft: StepDraft | None
    overtaken: list[Request]  # by those that it admits, which have a higher priority
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
        rows = self.rows
        kept = [i for i, row in enumerate(rows) if row.request.status is RequestStatus.RUNNING]
        if len(kept) == len(rows):
            return
        ended = [row for row in rows if row.request.status is not RequestStatus.RUNNING]
        num_tokens = sum(row.num_tokens for row in ended)
        self.num_wasted_tokens += num_tokens
        if self.draft is not None:
            num_decode = sum(row.num_tokens for row in ended if row.phase is Phase.DECODE)
            self.draft.drop_rows(kept, num_tokens - num_decode, num_decode)
        self.rows = [rows[i] for i in kept]
        self._kept = kept if self._kept is None else [self._kept[i] for i in kept]

    def launched(self, indices: Sequence[int]) -> list[ScheduledRow]:
        """Return the rows that had these indices at the launch, without those dropped since."""
        kept = self._kept
        return [self.scheduled.rows[i] for i in indices if kept is None or i in kept]

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


class Pipeline:
    def __init__(
        self, runner: Runner, scheduler: Scheduler, requests: ClientRequests, *, overlap: bool
    ) -> None:
        self.next_step = 0  # number of the next step to schedule
        # How many more steps may be scheduled; None: any number, 0: paused.
        self.steps_allowed: int | None = None
        self._runner = runner
        self._scheduler = scheduler
        self._requests = requests
        self._overlap = overlap
        self._batch_rows = BatchRows(scheduler)
        self._num_small = 0  # steps until `Scheduler.token_limit` is lifted
        # In flight: launched, and every step before it is published.
        self.ahead: PendingStep | None = None
        self._tokens_ns = 0  # when the tokens of the last step were known
        self._under_way: ScheduledStep | None = None  # what the engine's thread waits for
        self.lost: DeviceLostError | None = None  # why no step can run any more

    @property
    def has_step(self) -> bool:
        """Whether a step is in flight, or can be scheduled now."""
        if self.ahead is not None:
            return True
        return self.steps_allowed != 0 and self._scheduler.has_work()

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The step that the engine's thread launches or waits for. From any thread."""
        step = self._under_way
        if step is None:
            return None
        rows = [RunningRow(r.request.request_id, r.phase, r.start, r.num_tokens) for r in step.rows]
        budget = self._scheduler.step_knobs.max_num_batched_tokens
        return StepUnderWay(step.step, max(step.start_ns, self._tokens_ns), rows, budget)

    def take_in_flight(self) -> PendingStep | None:
        """Remove and return the step in flight, for the caller to finish; None if there is none."""
        step, self.ahead = self.ahead, None
        return step

    # Schedule

    def schedule(self, knobs_version: int, *, with_record: bool) -> PendingStep | None:
        """Return the step to finish now, if any. With overlap, also launch the step after it."""
        step = self.take_in_flight() or self._launch(None, knobs_version, with_record)
        if step is not None and self._may_run_ahead(step):
            self._set_apart(step)
            self._scheduler.assume(step.rows)
            self.ahead = self._launch(step, knobs_version, with_record)
            if self.ahead is not None:
                self._set_apart(self.ahead)
        return step

    def _launch(
        self, before: PendingStep | None, knobs_version: int, with_record: bool
    ) -> PendingStep | None:
        """Schedule and launch the next step, if any; it may need the result of `before`."""
        scheduler, clock = self._scheduler, self._runner.clock
        start_ns = clock()
        rows = scheduler.schedule()
        end_ns = clock()
        for request in scheduler.loaded_now:
            self._requests.note_loaded(request)
        if not rows:
            return None
        number = self.next_step
        after = None if before is None else before.handle
        step = ScheduledStep(number, rows, scheduler.num_padded_tokens, after, start_ns)
        self._under_way = step
        handle: InFlight = Unlaunched(self._runner, step)
        if self._overlap:
            try:
                handle = self._runner.launch(step)
            except Exception as error:  # noqa: BLE001 - raised when the step is executed
                handle = Unlaunched(self._runner, step, error)
        launched_ns = None if before is None else clock()
        draft = None
        if with_record:
            batch = self._batch_rows.encode(rows)
            draft = StepDraft.open(number, (start_ns, end_ns), batch, scheduler, knobs_version)
        self.next_step += 1
        if self.steps_allowed is not None:
            self.steps_allowed -= 1
        num_drafts, overtaken = scheduler.num_draft_tokens, scheduler.overtaken_now
        return PendingStep(
            step, rows, handle, launched_ns, draft, overtaken, num_draft_tokens=num_drafts
        )

    def _may_run_ahead(self, step: PendingStep) -> bool:
        return (
            self._overlap
            and self.steps_allowed != 0
            and not isinstance(step.handle, Unlaunched)
            and self._scheduler.can_run_ahead(step.rows)
        )

    def _set_apart(self, step: PendingStep) -> None:
        """Move the events and block changes so far into `step`, before the next is scheduled."""
        if step.draft is not None and step.planned is None:
            step.events += self._scheduler.drain_events()
            kv = self._scheduler.kv
            counts = kv.counts()  # before the drain, which sets some to zero
            step.planned = PlannedBlocks(kv.drain_changes(), counts)

    # Execute

    def execute(self, step: PendingStep) -> StepResult | None:
        self._under_way = step.scheduled
        try:
            result = step.handle.collect()
        except DeviceMemoryError:
            self._run_smaller(step)
            return None
        except Exception as error:
            log.exception(
                "step %d failed; its %d requests are ended", step.scheduled.step, len(step.rows)
            )
            if isinstance(error, DeviceLostError):
                self.lost = error
            self._give_up(step)
            return None
        finally:
            self._under_way = None
        step.tokens_before_ns, self._tokens_ns = self._tokens_ns, result.tokens_ns
        return result

    def _give_up(self, step: PendingStep) -> None:
        """End the requests of a failed step; the engine continues, unless it lost its device.

        If the next step was already launched, it relied on the result of `step`, so its result is
        discarded. The requests that are only in that next step are computed again.
        """
        ahead = self.take_in_flight()
        if ahead is not None:
            with contextlib.suppress(Exception):
                ahead.handle.collect()  # so that the device no longer uses its blocks
            self._undo(ahead)
        self._undo(step)
        for row in step.rows:
            self._requests.abort(row.request.request_id, "the engine failed in this step")
        self._scheduler.settle()
        for row in [] if ahead is None else ahead.rows:
            if row.request.status is RequestStatus.RUNNING:
                self._scheduler.preempt_after_failure(row.request, "step_failed")

    def _run_smaller(self, step: PendingStep) -> None:
        """Schedule again what did not fit into device memory, in smaller steps.

        If steps cannot be smaller, ends the largest request of this one instead.
        """
        self._undo(step)
        scheduler = self._scheduler
        num_tokens = sum(row.num_tokens for row in step.scheduled.rows)
        log.warning(
            "a step of %d tokens ran out of device memory: lower max_num_batched_tokens", num_tokens
        )
        if num_tokens > 1 and scheduler.knobs.enable_chunked_prefill:
            scheduler.token_limit, self._num_small = num_tokens // 2, SMALL_STEPS
        else:
            for row in sorted(step.rows, key=lambda row: row.num_tokens)[-1:]:
                reason = "the device has no memory for this request"
                self._requests.abort(row.request.request_id, reason)
        for request in scheduler.running[::-1]:  # also those that hit blocks of this step
            scheduler.preempt_after_failure(request, "device_memory")

    def _undo(self, step: PendingStep) -> None:
        """Let the next step have the number of `step`, and publish what `step` would have."""
        kv, planned = self._scheduler.kv, step.planned
        self._scheduler.return_events(step.events)
        if planned is not None:
            kv.publish_again(planned.changes, planned.counts)
        if self.steps_allowed is not None:
            self.steps_allowed += 1
        self.next_step = step.scheduled.step
        for request in step.overtaken:
            request.was_overtaken = False  # no record has told of it
        # Blocks were registered for content that this step should have written.
        kv.reset_prefix_cache()

    # Update

    def update(self, step: PendingStep, result: StepResult) -> int:
        """Apply the tokens of a step and deliver them. Returns how many requests ended."""
        if self._num_small:
            self._num_small -= 1
            if not self._num_small:
                self._scheduler.token_limit = None
        unsound = step.launched(result.unsound_rows)
        if unsound:
            self._end_unsound(step, unsound)
        result = step.result_of(result)
        bursts: dict[int, list[int]] = {}
        if step.num_draft_tokens:
            finished, bursts = take_bursts(self._scheduler, step.rows, result)
        else:
            finished = self._scheduler.update(step.rows, result.token_ids)
        if finished and self.ahead is not None:
            self.ahead.drop_ended()
        draft, publisher = step.draft, self._requests.token_publisher
        if bursts:
            last = [bursts.get(i, [token_id])[-1] for i, token_id in enumerate(result.token_ids)]
            result = replace(result, token_ids=last)
            if draft is not None:
                draft.check_drafts(step.rows, bursts, with_tokens=publisher is not None)
        if publisher is not None:  # it keeps all tokens, even if no record is made
            texts = publisher.texts(step.rows, result.token_ids, bursts)
            if draft is not None:
                draft.token_ids, draft.texts = result.token_ids, texts
        self._requests.deliver(step.rows, result, bursts)
        return len(finished) + len(unsound)

    def _end_unsound(self, step: PendingStep, rows: Sequence[ScheduledRow]) -> None:
        """End the requests whose logits were not finite; nobody gets a token made up for them."""
        for row in rows:
            request = row.request
            # NaN in its keys and values must not reach a prompt that begins alike.
            self._scheduler.kv.unregister(request, row.start + row.num_tokens)
            log.warning(
                "request %d of step %d: %s", request.request_id, step.scheduled.step, UNSOUND_LOGITS
            )
            self._requests.abort(request.request_id, UNSOUND_LOGITS)
        step.drop_ended()
        if self.ahead is not None:
            self.ahead.drop_ended()

    # The record

    def complete(
        self, draft: StepDraft, step: PendingStep, result: StepResult, num_finished: int
    ) -> None:
        """Add to the record of `step` everything that was not known when it was scheduled."""
        scheduler, ahead = self._scheduler, self.ahead
        if step.num_wasted_tokens:
            draft.num_wasted_tokens = step.num_wasted_tokens
        if not self._overlap:
            draft.num_running = len(scheduler.running)
            draft.end(result, scheduler.kv)
            return
        draft.end(result, None)
        if ahead is None or ahead.draft is None:
            draft.num_running, draft.num_waiting = len(scheduler.running), len(scheduler.waiting)
        else:
            draft.num_running -= num_finished
            ahead.draft.num_running -= num_finished
        planned_upon = None if ahead is None else ahead.planned
        draft.settle_between(scheduler.kv, step.planned, planned_upon)
        if step.launched_ns is not None:
            draft.hide(step.launched_ns, step.tokens_before_ns)
            draft.num_wasted_tokens = step.num_wasted_tokens
