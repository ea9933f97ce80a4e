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
from dataclasses import replace

from stepscope.engine.loop.delivery import Delivery
from stepscope.engine.loop.pending_step import FailedLaunch, PendingStep, Unlaunched
from stepscope.engine.protocol.replies import UNSOUND_LOGITS
from stepscope.engine.scheduling.acceptance import last_taken, take_bursts
from stepscope.engine.scheduling.request import RequestStatus
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import InFlight, Runner, ScheduledStep, StepResult
from stepscope.engine.telemetry.batch_rows import BatchRows
from stepscope.engine.telemetry.step_draft import PlannedBlocks, StepDraft
from stepscope.engine.telemetry.step_watcher import RunningRow, StepUnderWay

log = logging.getLogger("stepscope.engine")

FIRST_HOLD = 256  # steps
LAST_HOLD = 16_384


class TokenLimit:
    """Limits the size of steps (`tokens`, None: not at all) after one ran out of device memory.

    The runner repeats such a step in halves, but each failed attempt costs time. So the next steps
    are no larger than the largest part that ran. After some steps the limit is lifted, because
    memory that another program took may be free by then. If a step then fails again, the limit
    holds for twice as many steps.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._left = 0  # steps until the limit is lifted
        self._hold = FIRST_HOLD
        self._tried = 0  # the size that did not run; 0 once such a size has run again

    @property
    def is_on_trial(self) -> bool:
        """Whether the limit was lifted, but no step of the size that failed has run since."""
        return self.tokens is None and self._tried > 0

    def note(self, num_tokens: int, num_tokens_fit: int | None) -> None:
        """Take account of a step. `num_tokens_fit`: its largest part that ran; None: the whole."""
        if num_tokens_fit is not None:
            self._hold_to(max(1, num_tokens_fit), num_tokens)
        elif self.tokens is not None:
            self._left -= 1
            if not self._left:
                log.info("steps of more than %d tokens are tried again", self.tokens)
                self.tokens = None
        elif num_tokens >= self._tried:
            self._hold, self._tried = FIRST_HOLD, 0  # there is memory again

    def _hold_to(self, tokens: int, num_tokens: int) -> None:
        if self._tried:
            self._hold = min(2 * self._hold, LAST_HOLD)
        self.tokens, self._left, self._tried = tokens, self._hold, num_tokens
        log.warning(
            "a step of %d tokens ran out of device memory and was run in parts; the next %d steps "
            "have at most %d tokens; lower max_num_batched_tokens to avoid it",
            num_tokens,
            self._hold,
            tokens,
        )


class Pipeline:
    def __init__(
        self, runner: Runner, scheduler: Scheduler, delivery: Delivery, *, overlap: bool
    ) -> None:
        self.next_step = 0  # number of the next step to schedule
        # How many more steps may be scheduled; None: any number, 0: paused.
        self.steps_allowed: int | None = None
        self._runner = runner
        self._scheduler = scheduler
        self._delivery = delivery
        self._overlap = overlap
        self._batch_rows = BatchRows(scheduler)
        self._token_limit = TokenLimit()
        self._ahead: PendingStep | None = None  # launched; every step before it is published
        self._tokens_ns = 0  # when the tokens of the last step were known
        self._under_way: ScheduledStep | None = None  # what the engine's thread waits for

    @property
    def has_step_in_flight(self) -> bool:
        return self._ahead is not None

    @property
    def has_step(self) -> bool:
        """Whether a step is in flight, or can be scheduled now."""
        if self._ahead is not None:
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
        step, self._ahead = self._ahead, None
        return step

    # Schedule

    def schedule(self, knobs_version: int, *, with_record: bool) -> PendingStep | None:
        """Return the step to finish now, if any. With overlap, also launch the step after it."""
        step = self.take_in_flight() or self._launch(None, knobs_version, with_record)
        if step is not None and self._may_run_ahead(step):
            self._set_apart(step)
            self._scheduler.assume(step.rows)
            self._ahead = self._launch(step, knobs_version, with_record)
            if self._ahead is not None:
                self._set_apart(self._ahead)
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
            self._delivery.note_loaded(request)
        if not rows:
            return None
        number = self.next_step
        after = None if before is None else before.handle
        step = ScheduledStep(number, rows, scheduler.num_padded_tokens, after, start_ns)
        self._under_way = step
        handle: InFlight
        try:
            handle = self._runner.launch(step) if self._overlap else Unlaunched(self._runner, step)
        except Exception as error:  # noqa: BLE001 - raised when the step is executed
            handle = FailedLaunch(error)
        launched_ns = None if before is None else clock()
        draft = None
        if with_record:
            batch = self._batch_rows.encode(rows)
            draft = StepDraft.open(number, (start_ns, end_ns), batch, scheduler, knobs_version)
        self.next_step += 1
        if self.steps_allowed is not None:
            self.steps_allowed -= 1
        num_drafts = scheduler.num_draft_tokens
        return PendingStep(
            number, rows, handle, launched_ns, draft, step, num_draft_tokens=num_drafts
        )

    def _may_run_ahead(self, step: PendingStep) -> bool:
        return (
            self._overlap
            and self.steps_allowed != 0
            and step.handle.is_whole
            and self._scheduler.can_run_ahead(step.rows)
        )

    def _set_apart(self, step: PendingStep) -> None:
        """Move the events and block changes so far into `step`, before the next is scheduled."""
        if step.draft is not None and step.planned is None:
            step.events += self._scheduler.drain_events()
            step.planned = PlannedBlocks.drain(self._scheduler.kv)

    # Execute

    def execute(self, step: PendingStep) -> StepResult | None:
        self._under_way = step.scheduled
        try:
            result = step.handle.collect()
        except Exception:
            self._under_way = None
            log.exception("step %d failed; its %d requests are ended", step.number, len(step.rows))
            self._give_up(step)
            return None
        self._under_way = None
        step.tokens_before_ns, self._tokens_ns = self._tokens_ns, result.tokens_ns
        return result

    def _give_up(self, step: PendingStep) -> None:
        """End the requests of a failed step; the engine continues.

        If the next step was already launched, it relied on the result of `step`, so its result is
        discarded. The requests that are only in that next step are computed again.
        """
        ahead = self.take_in_flight()
        undone = [step] if ahead is None else [ahead, step]
        scheduler = self._scheduler
        if ahead is not None:
            with contextlib.suppress(Exception):
                ahead.handle.collect()  # so that the device no longer uses its blocks
        for each in undone:
            scheduler.return_events(each.events)
            if each.planned is not None:
                each.planned.give_back(scheduler.kv)
            if self.steps_allowed is not None:
                self.steps_allowed += 1
        self.next_step = step.number
        # Blocks were registered for content that this step should have written.
        scheduler.kv.reset_prefix_cache()
        for request in step.requests():
            self._delivery.abort(request.request_id, "the engine failed in this step")
        scheduler.settle()
        for request in [] if ahead is None else ahead.requests():
            if request.status is RequestStatus.RUNNING:
                scheduler.preempt_after_failure(request, "step_failed")

    # Update

    def update(self, step: PendingStep, result: StepResult) -> int:
        """Apply the tokens of a step and deliver them. Returns how many requests finished."""
        self._note_memory(step, result)
        if result.unsound_rows:
            self._end_unsound(step, result)
        result = step.result_of(result)
        bursts: dict[int, list[int]] = {}
        if step.num_draft_tokens:
            finished, bursts = take_bursts(self._scheduler, step.rows, result)
        else:
            finished = self._scheduler.update(step.rows, result.token_ids)
        if finished and self._ahead is not None:
            self._ahead.drop_ended()
        draft, publisher = step.draft, self._delivery.token_publisher
        if bursts:
            result = replace(result, token_ids=last_taken(result.token_ids, bursts))
            if draft is not None:
                draft.check_drafts(step.rows, bursts, with_tokens=publisher is not None)
        if publisher is not None:  # it keeps all tokens, even if no record is made
            texts = publisher.texts(step.rows, result.token_ids, bursts)
            if draft is not None:
                draft.token_ids, draft.texts = result.token_ids, texts
        self._delivery.deliver(step.rows, result, bursts)
        return len(finished)

    def _note_memory(self, step: PendingStep, result: StepResult) -> None:
        """If the device had no memory for a whole step, make the next steps smaller."""
        limit = self._token_limit
        if result.num_tokens_fit is None and limit.tokens is None and not limit.is_on_trial:
            return
        limit.note(sum(row.num_tokens for row in step.rows), result.num_tokens_fit)
        scheduler = self._scheduler
        if scheduler.token_limit != limit.tokens:
            scheduler.token_limit = limit.tokens
        if not result.unfit_rows:
            return
        unwritten: set[int] = set()
        for row in step.launched(result.unfit_rows):
            unwritten |= scheduler.kv.unregister(row.request, row.start, row.num_tokens)
            self._delivery.abort(
                row.request.request_id,
                "the device has no memory to compute even one token of this request",
            )
        # Requests that were admitted in this step on a prefix hit of blocks it failed to write.
        for request in [r for r in scheduler.running if not unwritten.isdisjoint(r.block_table)]:
            scheduler.preempt_after_failure(request, "device_memory")
        if step.draft is not None:
            step.draft.num_waiting = len(scheduler.waiting)
        step.drop_ended()

    def _end_unsound(self, step: PendingStep, result: StepResult) -> None:
        """End the requests whose logits were not finite; nobody gets a token made up for them."""
        for row in step.launched(result.unsound_rows):
            request = row.request
            # NaN in its keys and values must not reach a prompt that begins alike.
            self._scheduler.kv.unregister(request, 0, row.start + row.num_tokens)
            log.warning(
                "request %d of step %d: %s", request.request_id, step.number, UNSOUND_LOGITS
            )
            self._delivery.abort(request.request_id, UNSOUND_LOGITS)
        step.drop_ended()
        if self._ahead is not None:
            self._ahead.drop_ended()

    # The record

    def complete(
        self, draft: StepDraft, step: PendingStep, result: StepResult, num_finished: int
    ) -> None:
        """Add to the record of `step` everything that was not known when it was scheduled."""
        scheduler = self._scheduler
        if self._overlap:
            draft.end(result, None)
            self._complete_overlapped(draft, step, num_finished)
        else:
            draft.num_running = len(scheduler.running)
            draft.end(result, scheduler.kv)
        if step.num_wasted_tokens:
            draft.num_wasted_tokens = step.num_wasted_tokens

    def _complete_overlapped(self, draft: StepDraft, step: PendingStep, num_finished: int) -> None:
        scheduler, ahead = self._scheduler, self._ahead
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
